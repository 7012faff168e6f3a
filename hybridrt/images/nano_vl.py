"""Nemotron Nano VL v2's processor: tiles of one size and a thumbnail, resized in float32."""

import torch
import torch.nn.functional as F

from hybridrt.images.lfm2 import tile_grid
from hybridrt.images.pieces import ImagePiece
from hybridrt.images.settings import NanoVLImages


def nano_vl_pieces(pixels: torch.Tensor, settings: NanoVLImages, low: bool) -> list[ImagePiece]:
    """
    Args:
        pixels: [3, h, w] uint8.
        low: the thumbnail alone.
    """
    side, picture = settings.tile, pixels.float().contiguous()
    whole = _resized(picture, side, side, settings)
    height, width = pixels.shape[1:]
    across, down = (1, 1) if low else tile_grid(height, width, side, 1, settings.max_tiles)
    if across * down == 1:
        return [_piece(whole, settings)]
    tiles = (
        _resized(picture, down * side, across * side, settings).unflatten(2, (across, side)).unflatten(1, (down, side))
    )
    found = [_piece(tiles[:, row, :, column], settings) for row in range(down) for column in range(across)]
    return [*found, _piece(whole, settings)] if settings.thumbnail else found


def _resized(picture: torch.Tensor, height: int, width: int, settings: NanoVLImages) -> torch.Tensor:
    """What a bicubic resize has beyond 0 and 255 is kept."""
    if picture.shape[1:] == (height, width):
        return picture
    return F.interpolate(picture[None], (height, width), mode=settings.mode, align_corners=False, antialias=True)[0]


def _piece(picture: torch.Tensor, settings: NanoVLImages) -> ImagePiece:
    """Patches row by row; a patch is channel, y, x."""
    patch, count = settings.patch, settings.tile // settings.patch
    parts = picture.reshape(3, count, patch, count, patch).permute(1, 3, 0, 2, 4)
    tokens = count // settings.merge
    return ImagePiece("", parts.reshape(count * count, 3 * patch * patch).numpy(), (count, count), (tokens, tokens))
