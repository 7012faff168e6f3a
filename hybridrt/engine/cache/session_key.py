"""The key with which this user signs sessions, to tell own files from those of others."""

import os
import secrets
import stat
from pathlib import Path

from hybridrt.base.errors import SessionError
from hybridrt.base.files import read_bytes

VARIABLE = "HYBRIDRT_SESSION_KEY"
_LEAST = 16  # characters of a key
_BYTES = 32


def session_key() -> bytes:
    """The environment variable HYBRIDRT_SESSION_KEY, or else the user's key file, which is created
    if needed. If it cannot be created, a random key.

    Raises:
        SessionError: the key is too short, or others can read or write its file.
    """
    if text := os.environ.get(VARIABLE):
        if len(text) < _LEAST:
            raise SessionError(f"{VARIABLE} has {len(text)} characters; it must have {_LEAST} or more")
        return text.encode(errors="surrogateescape")
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = Path(base, "hybridrt", "session-key")
    try:
        if not file.exists():
            _make(file)
        found = file.lstat()
        key = read_bytes(file, 1 << 10)
    except OSError:  # a home that is missing, or read-only
        return secrets.token_bytes(_BYTES)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077 or len(key) < _LEAST:
        raise SessionError(
            f"{file} signs sessions, and must be a file of {_LEAST} bytes or more that its user alone can read (mode "
            f"0600): repair or remove it, or set {VARIABLE}"
        )
    return key


def _make(file: Path) -> None:
    """Makes the key. If two processes do so at the same time, the key of the first one stays."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.parent / f".{secrets.token_hex(8)}.part"
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(secrets.token_hex(_BYTES))
    try:
        os.link(partial, file)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
