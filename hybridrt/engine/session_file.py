"""Sessions on disk: a safetensors file of what the prefix cache holds of a text, and what identifies it."""

import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybridrt.errors import SessionError, is_text, reason, shown
from hybridrt.mem_cache.mamba_pool import Shapes
from hybridrt.runtime.prefix_copy import Tensors
from hybridrt.runtime.state_identity import Identity, first_difference

FORMAT = "hybridrt session 1"
TOKENS, POSITIONS = "tokens", "positions"
MAX_NOTE = 1 << 20  # characters
_MAX_HEADER = 1 << 26  # bytes
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.uint8: "U8",
    torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Session:
    """A session that was saved or loaded.

    Attributes:
        token_ids: the text, as far as it was cached. A prompt that begins with these tokens computes only the others.
        note: the caller's own text.
    """

    token_ids: list[int]
    note: str = ""


@dataclass(frozen=True)
class CachedPrefix:
    """What the prefix cache holds of a text, copied to main memory.

    Attributes:
        tokens: [n] int32 token ids.
        positions: numbers of tokens behind which recurrent states stand, in order.
        tensors: as hybridrt.runtime.prefix_copy.prefix_shapes says.
    """

    tokens: np.ndarray
    positions: list[int]
    tensors: Tensors


def write_session(path: Path, prefix: CachedPrefix, identity: Identity, note: str) -> None:
    """Writes a temporary file beside `path` and renames it: a reader sees the old file or the whole new one.

    Raises:
        SessionError: the note is no text, or too long; or the path is a device, a pipe or a socket, or no path.
        OSError: as from any file.
    """
    _check_path(path)
    if not isinstance(note, str) or not is_text(note) or len(note) > MAX_NOTE:
        raise SessionError(f"the note is {shown(note)}; it must be text of at most {MAX_NOTE} characters")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SessionError(f"{path} is not a regular file, and is not replaced; choose another name")
    tensors = {
        TOKENS: torch.from_numpy(prefix.tokens.astype(np.int32)),
        POSITIONS: torch.tensor(prefix.positions, dtype=torch.int32),
        **{name: tensor.contiguous() for name, tensor in prefix.tensors.items()},
    }
    metadata = {name: str(value) for name, value in identity.items()} | {"format": FORMAT, "note": note}
    metadata["checksum"] = _checksum(tensors, metadata)
    beside = path.parent / f".{secrets.token_hex(8)}.part"  # short: the name may be as long as a name can be
    try:
        save_file(tensors, beside, metadata)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except SafetensorError as e:
        raise OSError(f"{path} cannot be written: {e}") from e
    finally:
        beside.unlink(missing_ok=True)


class SessionReader:
    """Reads a file of `write_session`. The constructor checks the header; nothing is allocated for the contents before
    `read`.

    Raises:
        SessionError: it cannot be read, is no such file, is damaged, or belongs to another model.
        OSError: there is no such file, or it cannot be opened.

    Attributes:
        num_tokens, num_states: how many token ids and recurrent states it holds.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path, self._identity = path, identity
        _check_path(path)
        _check_header_size(path)
        try:
            self._file = safe_open(path, "pt")
            self._metadata: dict[str, str] = self._file.metadata() or {}
            self._names = set(self._file.keys())
        except SafetensorError as e:
            raise SessionError(f"{path} is damaged, or no safetensors file: {reason(e)}") from e
        self._check_identity()
        self.num_tokens, self.num_states = self._length(TOKENS), self._length(POSITIONS)

    def read(self, shapes: Shapes, vocab_size: int) -> tuple[CachedPrefix, str]:
        """All contents, checked, and the note.

        Args:
            shapes: of all tensors beside the tokens and the positions.

        Raises:
            SessionError: they are not what `shapes` says, or damaged.
        """
        self._check_shapes(shapes)
        try:
            found = {name: self._file.get_tensor(name) for name in (TOKENS, POSITIONS, *shapes)}
        except SafetensorError as e:
            raise SessionError(f"{self._path} is damaged: {reason(e)}") from e
        checksum = self._metadata.pop("checksum", None)
        if checksum != _checksum(found, self._metadata):
            raise SessionError(f"{self._path} is damaged: its contents do not match their checksum")
        tokens, positions = found.pop(TOKENS).numpy(), found.pop(POSITIONS).tolist()
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise SessionError(f"{self._path} holds token ids outside the vocabulary of {vocab_size}")
        ordered = [0, *positions, self.num_tokens + 1]
        if any(a >= b for a, b in pairwise(ordered)):
            raise SessionError(f"{self._path} holds states at {shown(positions)} of {self.num_tokens} tokens")
        for name, tensor in found.items():
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                raise SessionError(f"{name} of {self._path} is not finite: it is of no use to any request")
        return CachedPrefix(tokens, positions, found), self._metadata.get("note", "")

    def _check_identity(self) -> None:
        theirs, ours = dict(self._metadata), {name: str(value) for name, value in self._identity.items()}
        if theirs.get("format") != FORMAT:
            raise SessionError(
                f'{self._path} is no file of LLM.save_session: its "format" is {shown(theirs.get("format"))}, not '
                f"{FORMAT!r}"
            )
        for name in ("format", "note", "checksum"):
            theirs.pop(name, None)
        differs = first_difference(ours, theirs)
        if differs is not None:
            raise SessionError(
                f"{self._path} belongs to another model, or to one that runs otherwise: {differs} is "
                f"{shown(ours.get(differs))} here and {shown(theirs.get(differs))} there"
            )

    def _length(self, name: str) -> int:
        shape, dtype = self._described(name)
        if len(shape) != 1 or dtype != "I32":
            raise SessionError(f"{name} of {self._path} is {dtype} {list(shape)}; it must be a list of I32")
        return shape[0]

    def _check_shapes(self, shapes: Shapes) -> None:
        other = self._names ^ {TOKENS, POSITIONS, *shapes}
        if other:
            raise SessionError(f"{self._path} has tensors missing, or too many: {shown(min(other))}")
        for name, (shape, dtype) in shapes.items():
            found = self._described(name)
            if found != (shape, _DTYPES[dtype]):
                raise SessionError(
                    f"{name} of {self._path} is {found[1]} {list(found[0])}; it must be {_DTYPES[dtype]} {list(shape)}"
                )

    def _described(self, name: str) -> tuple[tuple[int, ...], str]:
        if name not in self._names:
            raise SessionError(f"{self._path} has no tensor {name!r}")
        part = self._file.get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()


def _check_path(path: Path) -> None:
    """Raises SessionError for what no file can be called."""
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise SessionError(f"{shown(str(path))} holds a character that no file name may hold; choose another name")


def _check_header_size(path: Path) -> None:
    """SessionError if the header is longer than one of ours, or than the file. To open a pipe could wait forever, and
    the library maps a file of any size."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise SessionError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        start, size = file.read(8), os.fstat(file.fileno()).st_size
    header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < header <= min(size - 8, _MAX_HEADER):
        raise SessionError(f"{path} is cut off, or no safetensors file: a header of {header} in {size} bytes")


def _checksum(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of the tensors, and of the metadata."""
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
