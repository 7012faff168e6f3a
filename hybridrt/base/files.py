"""Reads files that users name, with limits on time and memory, and writes files whole or not at all."""

import errno
import os
import secrets
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridrt.base.errors import HybridrtError, RequestError, shown

# Bytes, checked before parsing. The longest published: 100 KB of config.json, 15 MB of an index, 35
# MB of tokenizer.json, 2 MB of a weight file's header.
MAX_BYTES = 1 << 26  # bytes of a file that is read whole, where its caller sets no other limit
CONFIG_BYTES = 1 << 24
INDEX_BYTES = 1 << 26  # model.safetensors.index.json
TOKENIZER_BYTES = 1 << 28  # tokenizer.json and other vocabularies
WEIGHTS_HEADER_BYTES = 1 << 25  # header of a weight file: some 200,000 tensors
SESSION_HEADER_BYTES = 1 << 22  # header of a session, which may be loaded while a server answers: some 30,000 tensors
PATIENCE = 10.0  # seconds that a pipe may be silent
_PIECE = 1 << 20


def as_path(name: str, value: object, error: type[HybridrtError] = RequestError) -> Path:
    """A path that a caller has passed. `error`, with the argument's `name`, for anything else."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise error(f"{name} is {shown(value)}; pass the name of a file, as text or a pathlib.Path")
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise error(f"{shown(path)} holds a character that no file name may hold; choose another name")
    return Path(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file next to `path` to write within the block. It takes the place of `path` at the end of the block, or is
    removed after an error, and what was there stays. OSError: it cannot take the place."""
    partial = path.parent / f".{secrets.token_hex(8)}.part"  # short: the name of `path` may be as long as names can be
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):  # it is gone, or the error that ends the block says more
            partial.unlink()


def read_bytes(file: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The contents of a regular file or a pipe.

    Raises:
        OSError: it cannot be read, is something else (a device), has more than `max_bytes`, or is a
            pipe that nothing comes from.
    """
    found = bytearray()
    for piece in _pieces(file, max_bytes):
        found += piece
        _check_size(len(found), max_bytes, "it")
    return bytes(found)


def read_text(file: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """UTF-8 text with "\n" line ends.

    Raises:
        OSError: the errors of `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(file, max_bytes).decode().replace("\r\n", "\n").replace("\r", "\n")


def read_lines(file: str | Path) -> Iterator[str]:
    """The lines of UTF-8 text, each at most a megabyte. Reads the file as lines are consumed.
    Raises as `read_text`."""
    rest = b""
    for piece in _pieces(file, sys.maxsize):
        *lines, rest = (rest + piece).split(b"\n")
        _check_size(max(map(len, [*lines, rest])), _PIECE, "a line")
        yield from (line.decode() for line in lines)
    if rest:
        yield rest.decode()


def check_file(file: str | Path, max_bytes: int = MAX_BYTES) -> None:
    """For a file that a library reads whole. OSError unless it is a regular file of at most
    `max_bytes`."""
    found = os.stat(file)
    _check_kind(found.st_mode, stat.S_ISREG(found.st_mode), "a regular file")
    _check_size(found.st_size, max_bytes, "it")


def _pieces(file: str | Path, max_bytes: int) -> Iterator[bytes]:
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer opens at once
    try:
        found = os.fstat(opened)
        kind = found.st_mode
        _check_kind(kind, stat.S_ISREG(kind) or stat.S_ISFIFO(kind), "a regular file or a pipe")
        _check_size(found.st_size, max_bytes, "it")
        waiting = select.poll()
        waiting.register(opened, select.POLLIN)
        while waiting.poll(PATIENCE * 1000):
            if not (piece := os.read(opened, _PIECE)):
                return
            yield piece
        raise OSError(f"nothing has come through the pipe for {PATIENCE:g} seconds")
    finally:
        os.close(opened)


def _check_kind(mode: int, right: bool, wanted: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not right:
        raise OSError(f"it is not {wanted}")


def _check_size(size: int, max_bytes: int, what: str) -> None:
    if size > max_bytes:
        raise OSError(f"{what} has more than {max_bytes} bytes")
