"""Spans of a prompt: tokens that take their embeddings from an encoder instead of the table.

An image is one span, or several where a family cuts images into tiles. Nothing but `models/vision`
and the code that reads pictures knows what a span shows.
"""

from collections.abc import Sequence

import msgspec
import numpy as np


class EncoderInput(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """What an encoder reads for one span.

    Attributes:
        patches: [rows * columns, numbers of a patch] of `VisionSpec.patch_dtype`, before
            normalisation, in the order in which the family's processor lists patches.
        grid: rows and columns of patches.
        embeds: there is nothing to encode: `patches` [length, hidden] float32 are the embeddings
            themselves, of text, with positions of text. The grid is (1, length).
    """

    patches: np.ndarray
    grid: tuple[int, int]
    embeds: bool = False


class Span(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A run of placeholder tokens of a prompt.

    Attributes:
        start: index of its first token in the prompt.
        length: tokens, all of them placeholders.
        digest: 32 bytes, a hash of the encoder's input and of all that changes its embeddings.
            Spans of equal digest have equal embeddings.
        grid: rows and columns of its tokens: `length` is their product. Positions of families with
            positions on three axes follow from it.
        input: what the encoder reads.
    """

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int]
    input: EncoderInput


def mrope_positions(spans: Sequence[Span], start: int, end: int) -> np.ndarray:
    """[3, end - start] int32: places in time, rows and columns of a request's tokens `start` to
    `end`, whose prompt has `spans` in order (Qwen team 2025, arXiv:2502.13923).

    Text counts on all three axes. A span that begins at p has (p, p + row, p + column), and the
    text after it begins at p + its longer side.
    """
    found = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    for span in spans:
        if span.start >= end:
            break
        if span.input.embeds:
            continue
        last, (rows, columns) = span.start + span.length, span.grid
        if last > start:
            inside = np.arange(max(span.start, start), min(last, end), dtype=np.int32)
            place, index = found[:, inside - start], inside - span.start
            origin = place[0] - index  # the spans before have moved it already
            found[:, inside - start] = origin, origin + index // columns, origin + index % columns
            found[:, max(last, start) - start :] += max(rows, columns) - span.length
        else:
            found += max(rows, columns) - span.length
    return found


def mrope_delta(spans: Sequence[Span]) -> int:
    """What is added to the index of a token after all `spans`: zero or less."""
    return sum(max(span.grid) - span.length for span in spans if not span.input.embeds)
