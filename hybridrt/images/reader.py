"""Reads the pictures of a prompt: placeholders become spans with patches."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from hybridrt.base.errors import CheckpointError, ConfigError, PromptTooLongError, QueueFullError, RequestError
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.base.vision import VisionSpec
from hybridrt.images import nemotron
from hybridrt.images.decode import check_sides, digest_of
from hybridrt.images.held_bytes import HeldBytes
from hybridrt.images.jobs import Job, UnreadablePicture
from hybridrt.images.lfm2 import all_marks, lfm2_pieces
from hybridrt.images.nano_vl import nano_vl_pieces
from hybridrt.images.nemotron import nemotron_pieces
from hybridrt.images.pieces import ImagePiece
from hybridrt.images.pool import ImagePool, PoolLimits
from hybridrt.images.qwen import qwen_pieces
from hybridrt.images.settings import (
    ImageSettings,
    Lfm2Images,
    NanoVLImages,
    NemotronImages,
    QwenImages,
    read_image_settings,
)
from hybridrt.images.source import Address, ImageSource

_VERSION = "hybridrt image 1"  # of digests


@dataclass(frozen=True)
class PromptLimits:
    """
    Attributes:
        images: of one prompt.
        patch_bytes: bytes of patches of one prompt.
        seconds: that its images may keep processes and threads busy, all together.
    """

    images: int = 128
    patch_bytes: int = 1 << 28
    seconds: float = 60.0


@dataclass(frozen=True)
class _ReadPiece:
    piece: ImagePiece
    digest: bytes


Fetch = Callable[[Address, str], bytes]


def fetch_nothing(address: Address, place: str) -> bytes:
    """Raises RequestError: addresses of images are not fetched."""
    raise RequestError(
        f"{place}: https addresses of images are not fetched here; send a data: URI, or start the server with "
        "--allow-image-url HOST",
        place,
    )


class ImageReader:
    """Reads pictures for one model. Thread-safe. `close` ends its processes.

    Args:
        placeholder: token that templates write for a picture.
        vocabulary: tokens by their texts.
        weights: of clients, in sharing the processes; others have 1.

    Raises:
        CheckpointError: a token that pictures need is not in the vocabulary.

    Attributes:
        fetch: gets the bytes of an address.
        most_held: bytes of patches of all prompts that somebody keeps, of which a client that has a name may have
            half; None: no limit.
    """

    def __init__(
        self,
        settings: ImageSettings,
        placeholder: int,
        vocabulary: Mapping[str, int],
        limits: PromptLimits | None = None,
        pool_limits: PoolLimits | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.placeholder, self.limits = placeholder, limits or PromptLimits()
        names = {token: text for text, token in vocabulary.items()}
        if placeholder not in names:
            raise CheckpointError(f"the tokenizer has no token {placeholder}, the config's placeholder of images")
        self.text = names[placeholder]
        self._start, self._end, *tiles = _marks_of(settings)
        marks = [mark for mark in (self._start, self._end, *tiles) if mark]
        if missing := [mark for mark in marks if mark not in vocabulary]:
            raise CheckpointError(f"the tokenizer has no token {missing[0]}, which images of this model need")
        self._marks = {mark: vocabulary[mark] for mark in marks}
        self.fetch: Fetch = fetch_nothing
        self.most_held: int | None = None
        self._held = HeldBytes()
        self._settings = settings
        self.pool = ImagePool(pool_limits or PoolLimits(), weights)

    def close(self) -> None:
        self.pool.close()

    def check_count(self, count: int, field: str) -> None:
        """RequestError for more pictures than a prompt may have."""
        if count > self.limits.images:
            raise RequestError(f"the prompt has {count} images; at most {self.limits.images}", field)

    def expand(
        self, tokens: Sequence[int], sources: Sequence[ImageSource], max_tokens: int, client: str = ""
    ) -> tuple[list[int], tuple[Span, ...]]:
        """A prompt with as many placeholders as its pictures have tokens. Blocks while they are
        decoded.

        Args:
            tokens: with one placeholder for each picture, in order.
            max_tokens: longest prompt.
            client: for whom. Clients share processes and bytes.

        Raises:
            RequestError: numbers of placeholders and pictures differ, a picture cannot be read, or
                there are too many. PromptTooLongError: the prompt would be too long.
            QueueFullError: prompts that have not ended keep more bytes than `most_held` allows.
        """
        places = [i for i, token in enumerate(tokens) if token == self.placeholder]
        if len(places) != len(sources):
            raise RequestError(
                f"the prompt has {len(places)} image placeholders {self.text} and {len(sources)} images; each image "
                "has one, and text may not contain it",
                "prompt",
            )
        pictures = self._read_all(sources, max_tokens - len(tokens), client)
        return self._joined(tokens, places, pictures)

    def _read_all(self, sources: Sequence[ImageSource], room: int, client: str) -> list[list[_ReadPiece]]:
        """Reads as many at a time as a client may, so that other prompts get their turn."""
        self.check_count(len(sources), "prompt")
        found: list[list[_ReadPiece]] = []
        step, length, size, seconds = self.pool.limits.of_client, 0, 0, 0.0
        for start in range(0, len(sources), step):
            self._check_held(client)
            for picture, taken in self._read_some(sources[start : start + step], client):
                found.append(picture)
                seconds += taken
            pieces = [read.piece for picture in found[start:] for read in picture]
            length += sum(piece.tokens[0] * piece.tokens[1] for piece in pieces)
            size += sum(piece.patches.nbytes for piece in pieces)
            if length > room:
                raise PromptTooLongError(
                    f"the first {len(found)} images of the prompt have {length} tokens, and there is room for "
                    f"{max(0, room)}: send fewer or smaller images, or raise max_model_len",
                    "prompt",
                )
            if size > self.limits.patch_bytes:
                text = f"the images of the prompt have more than {self.limits.patch_bytes} bytes of patches; send fewer"
                raise RequestError(text, "prompt")
            if seconds > self.limits.seconds and len(found) < len(sources):
                text = f"the first {len(found)} of {len(sources)} images of the prompt took {seconds:.0f} seconds"
                raise RequestError(f"{text}, and {self.limits.seconds:g} may be spent: send fewer or smaller", "prompt")
        return found

    def _read_some(self, sources: Sequence[ImageSource], client: str) -> list[tuple[list[_ReadPiece], float]]:
        """Pictures, and the seconds that each has taken."""
        running = [self.pool.threads.submit(client, partial(self._timed, source, client)) for source in sources]
        try:
            return [each.result() for each in running]
        finally:  # after an error
            for each in running:
                each.cancel()

    def _timed(self, source: ImageSource, client: str) -> tuple[list[_ReadPiece], float]:
        """Does not count the wait for a thread."""
        began = time.monotonic()
        return self._read(source, client), time.monotonic() - began

    def _check_held(self, client: str) -> None:
        if self.most_held is None:
            return
        held = self._held.by_client()
        total, own = sum(held.values()), held.get(client, 0)
        share = self.most_held // 2 if client else self.most_held
        for whose, size, most in (("", total, self.most_held), (" of this client", own, share)):
            if size > most:
                raise QueueFullError(
                    f"the images of requests{whose} that have not ended have {size} bytes of patches, and {most} may "
                    "be there at a time: try again later"
                )

    def _read(self, source: ImageSource, client: str) -> list[_ReadPiece]:
        content, place, most = source.content, source.place, self.pool.limits.max_pixels
        try:
            if isinstance(content, np.ndarray):
                check_sides(content.shape[1], content.shape[0], most)
                pixels, digest = content, digest_of(content)
            elif isinstance(content, str):
                pixels, digest = self.pool.decode(Job("base64", content.encode(errors="replace"), most))
            else:
                data = self.fetch(content, place) if isinstance(content, Address) else content
                pixels, digest = self.pool.decode(Job("file", data, most))
            return self._pieces(pixels, digest, source.low, client)
        except UnreadablePicture as e:
            raise RequestError(f"{place}: the image cannot be read: {e}", place) from e

    def _pieces(self, pixels: np.ndarray, digest: bytes, low: bool, client: str) -> list[_ReadPiece]:
        settings = self._settings
        picture = torch.from_numpy(pixels).permute(2, 0, 1)
        if isinstance(settings, QwenImages):
            pieces = qwen_pieces(picture, settings, low)
        elif isinstance(settings, Lfm2Images):
            pieces = lfm2_pieces(picture, settings, low)
        elif isinstance(settings, NemotronImages):
            pieces = nemotron_pieces(picture, settings, low)
        else:
            pieces = nano_vl_pieces(picture, settings, low)
        for piece in pieces:
            self._held.add(piece.patches, client)
        framed = [[_VERSION, settings, digest, low, i] for i in range(len(pieces))]
        return [_ReadPiece(piece, sha256(msgspec.msgpack.encode(each)).digest()) for piece, each in zip(pieces, framed)]

    def _joined(
        self, tokens: Sequence[int], places: Sequence[int], pictures: Sequence[Sequence[_ReadPiece]]
    ) -> tuple[list[int], tuple[Span, ...]]:
        found, spans, done = list[int](), list[Span](), 0
        for place, picture in zip(places, pictures, strict=True):
            found += tokens[done:place]
            done = place + 1
            found += self._mark(self._start)
            for read in picture:
                found += self._mark(read.piece.before)
                spans.append(_span(len(found), read))
                found += [self.placeholder] * spans[-1].length
            found += self._mark(self._end)
        return [*found, *tokens[done:]], tuple(spans)

    def _mark(self, text: str) -> list[int]:
        return [self._marks[text]] if text in self._marks else []


def _marks_of(settings: ImageSettings) -> list[str]:
    """Texts of tokens before a picture, after it ("" if none), and in it."""
    if isinstance(settings, (NemotronImages, NanoVLImages)):
        return [nemotron.START, nemotron.END]
    return (all_marks(settings) if isinstance(settings, Lfm2Images) else []) or ["", ""]


def image_reader(
    directory: Path, vision: VisionSpec | None, tokenizer: Any, weights: Mapping[str, float] | None = None
) -> ImageReader | None:
    """The reader of a checkpoint. None: its model has no encoder, or it has no tokenizer.

    Args:
        tokenizer: transformers'.
        weights: of clients.

    Raises:
        ConfigError, CheckpointError: its processor cannot be used; the text says why.
    """
    if vision is None or tokenizer is None or (settings := read_image_settings(directory)) is None:
        return None
    if (settings.patch, settings.merge) != (vision.patch_size, vision.merge):
        raise ConfigError(
            f"{directory}: the image processor makes a token of {settings.merge} x {settings.merge} patches of "
            f"{settings.patch} pixels, and the tower of {vision.merge} x {vision.merge} of {vision.patch_size}; make "
            "them equal"
        )
    return ImageReader(settings, vision.token, tokenizer.get_vocab(), weights=weights)


def _span(start: int, read: _ReadPiece) -> Span:
    rows, columns = read.piece.tokens
    given = EncoderInput(read.piece.patches, read.piece.grid)
    return Span(start, rows * columns, read.digest, read.piece.tokens, given)
