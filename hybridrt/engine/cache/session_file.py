"""Sessions on disk: a safetensors file with a text's cached prefix, and its identity."""

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hybridrt.base.errors import SessionError, is_text, shown
from hybridrt.base.files import SESSION_HEADER_BYTES, as_path, replacing
from hybridrt.base.files_safetensors import DamagedFileError, TensorFile
from hybridrt.base.formats import Format
from hybridrt.engine.request.spans import without_keys
from hybridrt.mem_cache.pools.mamba_pool_spec import Shapes
from hybridrt.runtime.load.state_identity import Identity, first_difference
from hybridrt.runtime.run.prefix_copy import Tensors

FORMAT = Format("hybridrt session", 2, "compute the text again and save it")
TOKENS, POSITIONS, NOTE = "tokens", "positions", "note"
MAX_NOTE = 1 << 20  # characters
_NOTE_IN_HEADER = 1 << 14  # characters; a longer note is a tensor of its UTF-8 bytes, so that headers stay short
_ENTRY = 160  # most bytes of a header per tensor
MAX_TENSORS = SESSION_HEADER_BYTES // _ENTRY - 1024
_RANKS = "tp_size"  # of those that wrote a file
_MOST_RANKS = 64
_CHECKS = "format", "note", "checksum", "signature", _RANKS
_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.uint8: "U8",
    torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Session:
    """A session that was saved or loaded.

    Attributes:
        token_ids: the cached text. A prompt that begins with these tokens computes only the others.
        note: the caller's own text.
        cache_salt: of the requests that it serves, for SamplingParams.cache_salt: "" for those
            without one.
    """

    token_ids: list[int]
    note: str = ""
    cache_salt: str = ""


@dataclass(frozen=True)
class CachedPrefix:
    """The cached part of a text, copied to main memory.

    Attributes:
        tokens: [n] ids of the prefix cache, int32, with images int64.
        positions: numbers of tokens that have a recurrent state after them, in order.
        tensors: as hybridrt.runtime.run.prefix_copy.prefix_shapes says.
    """

    tokens: np.ndarray
    positions: list[int]
    tensors: Tensors


def write_session(path: Path, prefix: CachedPrefix, identity: Identity, note: str, key: bytes, ranks: int) -> None:
    """Writes a temporary file next to `path` and renames it, so readers see the old file or the
    whole new one.

    Args:
        key: signs it.
        ranks: that the tensors are cut over.

    Raises:
        SessionError: the note is no text, or too long; or the path is a device, a pipe or a socket,
            or no path.
        OSError: as from any file.
    """
    as_path("path", path, SessionError)
    if not isinstance(note, str) or not is_text(note) or len(note) > MAX_NOTE:
        raise SessionError(f"the note is {shown(note)}; it must be text of at most {MAX_NOTE} characters")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SessionError(f"{path} is not a regular file, and is not replaced; choose another name")
    tensors = {
        TOKENS: torch.from_numpy(prefix.tokens),
        POSITIONS: torch.tensor(prefix.positions, dtype=torch.int32),
        **{name: tensor.contiguous() for name, tensor in prefix.tensors.items()},
    }
    metadata = {name: str(value) for name, value in identity.items()}
    metadata |= {"format": str(FORMAT), "note": note, _RANKS: str(ranks)}
    if len(note) > _NOTE_IN_HEADER:
        metadata["note"], tensors[NOTE] = "", torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)
    metadata["checksum"] = _checksum(tensors, metadata)
    metadata["signature"] = _signature(metadata["checksum"], key)
    try:
        with replacing(path) as partial:
            save_file(tensors, partial, metadata)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
    except SafetensorError as e:
        raise OSError(f"{path} cannot be written: {e}") from e


class SessionReader:
    """Reads a file of `write_session`. The constructor checks the header; contents are allocated by
    `read`.

    Raises:
        SessionError: it cannot be read, is no such file, is damaged, or belongs to another model.
        OSError: there is no such file, or it cannot be opened.

    Attributes:
        num_tokens, num_states: numbers of token ids and recurrent states.
        num_ranks: that the tensors are cut over.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path, self._identity = path, identity
        as_path("path", path, SessionError)
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SessionError(f"{path} is not a regular file; pass the path of a session that save_session wrote")
        try:
            self._file = TensorFile(path, SESSION_HEADER_BYTES)
        except DamagedFileError as e:
            raise SessionError(f"{path} cannot be used: {e}") from e
        try:
            self._metadata = dict(self._file.metadata)
            self._check_text()
            self._check_identity()
            self.num_ranks = self._read_ranks()
            # Ids of images' tokens have 64 bits.
            self.num_tokens, self.num_states = self._length(TOKENS, "I32", "I64"), self._length(POSITIONS, "I32")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SessionReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def signed_with(self, key: bytes) -> bool:
        """True if the file was signed with this key. Call it after `read`, which has compared the
        checksum.
        """
        signature = _signature(self._metadata["checksum"], key)
        return hmac.compare_digest(signature.encode(), self._metadata.get("signature", "").encode())

    @property
    def own_salt(self) -> str:
        return f"session {self._metadata['checksum']}"

    def read(self, shapes: Shapes, vocab_size: int) -> tuple[CachedPrefix, str]:
        """All contents, checked, and the note. `shapes`: of all tensors except tokens and
        positions. SessionError if they differ or are damaged.
        """
        self._check_shapes(shapes)
        notes = [NOTE] if NOTE in self._file.entries else []
        try:
            found = {name: self._file.read(name) for name in (TOKENS, POSITIONS, *notes, *shapes)}
            self._file.check_unchanged()
        except (DamagedFileError, OSError) as e:
            raise SessionError(f"{self._path} cannot be used: {e}") from e
        if self._metadata.get("checksum") != _checksum(found, self._metadata):
            raise SessionError(f"{self._path} is damaged: its contents do not match their checksum")
        note = self._note(found)
        tokens, positions = found.pop(TOKENS).numpy(), found.pop(POSITIONS).tolist()
        if tokens.min() < 0 or without_keys(tokens).max(initial=0) >= vocab_size:
            raise SessionError(
                f"{self._path} holds token ids outside the vocabulary of {vocab_size}: it was not saved with this model"
            )
        ordered = [0, *positions, self.num_tokens + 1]
        if any(a >= b for a, b in pairwise(ordered)):
            raise SessionError(f"{self._path} holds states at {shown(positions)} of {self.num_tokens} tokens")
        for name, tensor in found.items():
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                raise SessionError(f"{name} of {self._path} is not finite: it is of no use to any request")
        return CachedPrefix(tokens, positions, found), note

    def _note(self, found: dict[str, torch.Tensor]) -> str:
        if NOTE not in found:
            return self._metadata.get("note", "")
        try:
            return found.pop(NOTE).numpy().tobytes().decode()
        except UnicodeDecodeError as e:
            raise SessionError(f"{self._path} has a note that is no UTF-8: {e}") from e

    def _check_text(self) -> None:
        """JSON may hold half of a surrogate pair, which no text that is sent or hashed may."""
        for name, text in self._metadata.items():
            if not is_text(name) or not is_text(text):
                raise SessionError(
                    f"{self._path} has {shown(name)} {shown(text)} in its header, which is no Unicode text"
                )

    def _check_identity(self) -> None:
        theirs, ours = dict(self._metadata), {name: str(value) for name, value in self._identity.items()}
        if refusal := FORMAT.refusal(theirs.get("format")):
            raise SessionError(f"{self._path} is no file of this version's LLM.save_session: {refusal}")
        for name in _CHECKS:
            theirs.pop(name, None)
        differs = first_difference(ours, theirs)
        if differs is not None:
            raise SessionError(
                f"{self._path} belongs to another model, or to one that runs otherwise: {differs} is "
                f"{shown(ours.get(differs))} here and {shown(theirs.get(differs))} there"
            )

    def _read_ranks(self) -> int:
        text = self._metadata.get(_RANKS, "")
        ranks = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
        if not 1 <= ranks <= _MOST_RANKS:
            raise SessionError(f"{self._path} has {_RANKS} {shown(text)}; it must be a number from 1 to {_MOST_RANKS}")
        return ranks

    def _length(self, name: str, *dtypes: str) -> int:
        shape, dtype = self._described(name)
        if len(shape) != 1 or dtype not in dtypes:
            raise SessionError(
                f"{name} of {self._path} is {dtype} {list(shape)}; it must be a list of {' or '.join(dtypes)}"
            )
        return shape[0]

    def _check_shapes(self, shapes: Shapes) -> None:
        note = self._file.entries.get(NOTE)
        if note is not None and (note.dtype != "U8" or len(note.shape) != 1 or note.size > 4 * MAX_NOTE):
            raise SessionError(f"the note of {self._path} is {note.dtype} {list(note.shape)}; it must be a text")
        other = (self._file.entries.keys() - {NOTE}) ^ {TOKENS, POSITIONS, *shapes}
        if other:
            raise SessionError(f"{self._path} has tensors missing, or too many: {shown(min(other))}")
        for name, (shape, dtype) in shapes.items():
            found = self._described(name)
            if found != (shape, _DTYPES[dtype]):
                raise SessionError(
                    f"{name} of {self._path} is {found[1]} {list(found[0])}; it must be {_DTYPES[dtype]} {list(shape)}"
                )

    def _described(self, name: str) -> tuple[tuple[int, ...], str]:
        entry = self._file.entries.get(name)
        if entry is None:
            raise SessionError(f"{self._path} has no tensor {name!r}: it is damaged, save the session again")
        return entry.shape, entry.dtype


def _signature(checksum: str, key: bytes) -> str:
    """HMAC-SHA-256 of a checksum (RFC 2104)."""
    return hmac.new(key, checksum.encode(), hashlib.sha256).hexdigest()


def _checksum(tensors: Tensors, metadata: Mapping[str, str]) -> str:
    """SHA-256 of the metadata, and of names, dtypes, shapes and bytes of the tensors."""
    texts = {name: text for name, text in metadata.items() if name not in ("checksum", "signature")}
    digest = hashlib.sha256(repr(sorted(texts.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
