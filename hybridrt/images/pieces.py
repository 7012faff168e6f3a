"""Pieces, which are the results of processors, and resizing that processors share."""

import math

import msgspec
import numpy as np
import torch
import torch.nn.functional as F


class ImagePiece(msgspec.Struct, frozen=True, eq=False):
    """One sequence for an encoder: a picture, a tile of it, or its thumbnail.

    Attributes:
        before: text of the token that comes before the piece's placeholders; "" if none.
        patches: [rows * columns, numbers of a patch] uint8.
        grid: rows and columns of patches.
        tokens: rows and columns of placeholders.
    """

    before: str
    patches: np.ndarray
    grid: tuple[int, int]
    tokens: tuple[int, int]


def resized(pixels: torch.Tensor, height: int, width: int, mode: str) -> torch.Tensor:
    """Resizes bytes [3, h, w] as torchvision does: with antialiasing, in whole numbers."""
    if pixels.shape[1:] == (height, width):
        return pixels
    found = F.interpolate(pixels[None], (height, width), mode=mode, align_corners=False, antialias=True)
    return found[0]


def fitted_size(
    height: int, width: int, block: int, min_pixels: int, max_pixels: int, least: int = 0
) -> tuple[int, int]:
    """Qwen2-VL's smart_resize: sides that are multiples of `block`, pixels within limits, about the
    same aspect. Python's rounding: half to even. `least`: blocks of a side before the limits.
    """
    rows, columns = (max(least, round(side / block)) for side in (height, width))
    pixels = rows * columns * block * block
    if pixels > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / beta / block)) for side in (height, width))
    elif pixels < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * beta / block) for side in (height, width))
    return rows * block, columns * block
