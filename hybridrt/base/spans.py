"""Spans of a prompt: tokens that take their embeddings from an encoder instead of the table.

An image is one span, or several where a family cuts images into tiles. Nothing but `models/vision`
and the code that reads pictures knows what a span shows.
"""

import msgspec
import numpy as np


class EncoderInput(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """What an encoder reads for one span.

    Attributes:
        patches: [rows * columns, numbers of a patch] uint8, before normalisation, in the order in
            which the family's processor lists patches.
        grid: rows and columns of patches.
    """

    patches: np.ndarray
    grid: tuple[int, int]


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
