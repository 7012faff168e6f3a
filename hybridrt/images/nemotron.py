"""Nemotron Omni's processor: one piece a picture, resized in float32 without a clamp to 0 to 255."""

import math

import torch
import torch.nn.functional as F

from hybridrt.images.jobs import UnreadablePicture
from hybridrt.images.pieces import ImagePiece
from hybridrt.images.settings import NemotronImages

START, END = "<img>", "</img>"
LOW_PATCHES = 1024  # in low detail


def nemotron_pieces(pixels: torch.Tensor, settings: NemotronImages, low: bool) -> list[ImagePiece]:
    """
    Args:
        pixels: [3, h, w] uint8.

    Raises:
        UnreadablePicture: within the limit of patches it would be narrower than one.
    """
    height, width = pixels.shape[1:]
    most = max(settings.min_patches, min(LOW_PATCHES, settings.max_patches)) if low else settings.max_patches
    rows, columns = _grid(height, width, settings, most)
    if not rows * columns:
        raise UnreadablePicture(f"its aspect ratio is too large: {width} x {height} has less than a patch across")
    picture, sides = pixels.float().contiguous(), (rows * settings.patch, columns * settings.patch)
    if (height, width) != sides:
        picture = F.interpolate(picture[None], sides, mode=settings.mode, align_corners=False, antialias=True)[0]
    parts = picture.reshape(3, rows, settings.patch, columns, settings.patch).permute(1, 3, 0, 2, 4)
    patches = parts.reshape(rows * columns, 3 * settings.patch**2)
    return [ImagePiece("", patches.numpy(), (rows, columns), (rows // settings.merge, columns // settings.merge))]


def _grid(height: int, width: int, settings: NemotronImages, most: int) -> tuple[int, int]:
    """Rows and columns of patches, multiples of `merge`. They may pass the limit if both sides are
    enlarged."""
    rows, columns = (round(side / settings.patch + 0.5) for side in (height, width))
    factor = min(math.sqrt(most / (rows * columns)), 1.0)
    rows, columns = math.floor(factor * rows), math.floor(factor * columns)
    if not rows * columns:
        return 0, 0
    if most > settings.min_patches and rows * columns < settings.min_patches:
        factor = math.sqrt(settings.min_patches / (rows * columns))
        rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
    rows = _multiple(rows, columns, settings.merge, most)
    return rows, _multiple(columns, rows, settings.merge, most)


def _multiple(side: int, other: int, merge: int, most: int) -> int:
    remainder = side % merge
    if not remainder:
        return side
    larger = side + merge - remainder
    return larger if larger * other <= most else max(merge, side - remainder)
