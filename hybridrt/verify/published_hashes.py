"""The hub's hashes of a checkpoint's files, which its client keeps on the disk."""

import hashlib
import re
from pathlib import Path

from hybridrt.base.errors import CheckpointError
from hybridrt.base.files import read_text

KINDS = (".json", ".jinja", ".safetensors", ".model", ".txt")
MOST_FILES = 10_000
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_BLOCK = 1 << 24
_METADATA_BYTES = 1 << 12


def checkpoint_files(path: Path) -> list[Path]:
    """The files of a checkpoint that a runtime reads.

    Raises:
        CheckpointError: the directory holds too many files.
    """
    found = sorted(file for file in path.iterdir() if file.suffix in KINDS and file.is_file())
    if len(found) > MOST_FILES:
        raise CheckpointError(f"{path} has {len(found)} files; a checkpoint may have {MOST_FILES}")
    return found


def sha256_of(file: Path) -> str:
    return _digest(file, hashlib.sha256())


def published_hash(file: Path) -> str | None:
    """The hash of a file that was downloaded from the hub: 64 hex digits (sha256) or 40 (git). None
    if the client has kept none.

    The hub's cache names each file by its hash. A download into a directory has a note for each file.
    """
    if file.is_symlink():
        name = file.readlink().name
        return name if _SHA256.fullmatch(name) or _GIT.fullmatch(name) else None
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    if not note.is_file():
        return None
    try:
        lines = read_text(note, _METADATA_BYTES).splitlines()
    except (OSError, ValueError):  # no note of the client
        return None
    etag = lines[1].strip() if len(lines) > 1 else ""
    return etag if _SHA256.fullmatch(etag) or _GIT.fullmatch(etag) else None


def has_hash(file: Path, wanted: str, sha256: str) -> bool:
    """Whether a file has a hash of the hub. `sha256`: the file's."""
    if len(wanted) == 64:
        return sha256 == wanted
    return _digest(file, hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)) == wanted


def _digest(file: Path, digest: "hashlib._Hash") -> str:
    with file.open("rb") as f:
        while block := f.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
