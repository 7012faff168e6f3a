"""Nemotron Omni's processor: one piece a picture, of nearly as many patches as it has itself.

A resized picture keeps what a bicubic filter makes of it, below 0 and above 255 too.
"""

import math

import torch
import torch.nn.functional as F

from hybridrt.images.jobs import UnreadablePicture
from hybridrt.images.pieces import Piece
from hybridrt.images.settings import NemotronImages

START, END = "<img>", "</img>"
LOW_PATCHES = 1024  # of a picture in low detail, unless the model's minimum is more


def nemotron_pieces(pixels: torch.Tensor, settings: NemotronImages, low: bool) -> list[Piece]:
    """
    Args:
        pixels: [3, h, w] uint8.

    Raises:
        UnreadablePicture: it is so narrow that no row of patches is left of it.
    """
    height, width = pixels.shape[1:]
    most = max(settings.min_patches, min(LOW_PATCHES, settings.max_patches)) if low else settings.max_patches
    rows, columns = _grid(height, width, settings, most)
    sides, picture = (rows * settings.patch, columns * settings.patch), pixels.float()
    if (height, width) != sides:
        picture = F.interpolate(picture[None], sides, mode=settings.mode, align_corners=False, antialias=True)[0]
    tokens = rows // settings.merge, columns // settings.merge
    return [Piece("", _patches(picture, settings.patch).numpy(), (rows, columns), tokens)]


def _grid(height: int, width: int, settings: NemotronImages, most: int) -> tuple[int, int]:
    """Rows and columns of patches: the picture's own number, scaled into the limits, then multiples
    of `merge`."""
    rows, columns = (round(side / settings.patch + 0.5) for side in (height, width))
    shrink = min(math.sqrt(most / (rows * columns)), 1.0)
    rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
    if not rows * columns:
        raise UnreadablePicture(
            f"its aspect ratio is too large: {width} x {height} would have more than {most} patches"
        )
    if rows * columns < settings.min_patches < most:
        grow = math.sqrt(settings.min_patches / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    rows = _multiple(rows, columns, settings.merge, most)
    return rows, _multiple(columns, rows, settings.merge, most)


def _multiple(side: int, other: int, merge: int, most: int) -> int:
    """The next multiple of `merge`, or the one before if there would be too many patches."""
    rest = side % merge
    if not rest:
        return side
    return side + merge - rest if (side + merge - rest) * other <= most else max(merge, side - rest)


def _patches(picture: torch.Tensor, patch: int) -> torch.Tensor:
    """Row by row; a patch is channel, y, x."""
    rows, columns = (side // patch for side in picture.shape[1:])
    parts = picture.reshape(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
    return parts.reshape(rows * columns, 3 * patch * patch)
