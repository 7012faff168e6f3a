"""Qwen2-VL's processor: one piece a picture.

There, patches have a picture twice, as two frames. Here they have it once, and the tower adds up the
weights (models/vision/qwen3_5.py).
"""

import torch

from hybridrt.images.jobs import UnreadablePicture
from hybridrt.images.pieces import ImagePiece, fitted_size, resized
from hybridrt.images.settings import QwenImages

MAX_ASPECT = 200
LOW_PIXELS = 512 * 512  # in low detail


def qwen_pieces(pixels: torch.Tensor, settings: QwenImages, low: bool) -> list[ImagePiece]:
    """
    Args:
        pixels: [3, h, w] uint8.

    Raises:
        UnreadablePicture: one side is more than MAX_ASPECT times the other.
    """
    height, width = pixels.shape[1:]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise UnreadablePicture(f"its aspect ratio is above {MAX_ASPECT}")
    most = max(settings.min_pixels, min(LOW_PIXELS, settings.max_pixels)) if low else settings.max_pixels
    block = settings.patch * settings.merge
    sides = fitted_size(height, width, block, settings.min_pixels, most)
    picture = resized(pixels, *sides, settings.mode)
    rows, columns = (side // settings.patch for side in sides)
    tokens = rows // settings.merge, columns // settings.merge
    return [ImagePiece("", _patches(picture, settings).numpy(), (rows, columns), tokens)]


def _patches(picture: torch.Tensor, settings: QwenImages) -> torch.Tensor:
    """Blocks row by row, in a block patches row by row; a patch is channel, y, x."""
    patch, merge = settings.patch, settings.merge
    rows, columns = (side // (patch * merge) for side in picture.shape[1:])
    parts = picture.reshape(3, rows, merge, patch, columns, merge, patch).permute(1, 4, 2, 5, 0, 3, 6)
    return parts.reshape(rows * columns * merge * merge, 3 * patch * patch)
