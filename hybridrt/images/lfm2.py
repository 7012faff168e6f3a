"""LFM2-VL's processor: a small picture is one piece; a large one is tiles and a thumbnail."""

from functools import cache

import torch

from hybridrt.images.jobs import UnreadablePicture
from hybridrt.images.pieces import ImagePiece, fitted_size, resized
from hybridrt.images.settings import Lfm2Images

START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


def all_marks(settings: Lfm2Images) -> list[str]:
    """Texts of the tokens that pictures of these settings may need."""
    grids = _grids(settings.min_tiles, settings.max_tiles) if settings.marks else []
    places = {(row, column) for across, down in grids for row in range(down) for column in range(across)}
    return [START, END, THUMBNAIL, *(tile_mark(*place) for place in sorted(places))] if settings.marks else []


def tile_mark(row: int, column: int) -> str:
    return f"<|img_row_{row + 1}_col_{column + 1}|>"


def lfm2_pieces(pixels: torch.Tensor, settings: Lfm2Images, low: bool) -> list[ImagePiece]:
    """
    Args:
        pixels: [3, h, w] uint8.
        low: no tiles.

    Raises:
        UnreadablePicture: it is so narrow that, as one piece, it would have more than the most
            tokens.
    """
    height, width = pixels.shape[1:]
    if low or settings.max_tiles == 1 or not _is_large(height, width, settings):
        return [_piece("", _whole(pixels, settings), settings)]
    across, down = tile_grid(height, width, settings.tile, settings.min_tiles, settings.max_tiles)
    picture = resized(pixels, down * settings.tile, across * settings.tile, settings.mode)
    places = [(row, column) for row in range(down) for column in range(across)]
    side, single = settings.tile, len(places) == 1
    found = [
        _piece(
            tile_mark(row, column) if settings.marks and not single else "",
            picture[:, row * side : (row + 1) * side, column * side : (column + 1) * side],
            settings,
        )
        for row, column in places
    ]
    if settings.thumbnail and not single:
        found.append(_piece(THUMBNAIL if settings.marks else "", _whole(pixels, settings), settings))
    return found


def _whole(pixels: torch.Tensor, settings: Lfm2Images) -> torch.Tensor:
    """The picture as one piece. Raises UnreadablePicture."""
    height, width = pixels.shape[1:]
    block = settings.patch * settings.merge
    least, most = settings.min_tokens * block * block, settings.max_tokens * block * block
    sides = fitted_size(height, width, block, least, most, least=1)
    if sides[0] * sides[1] > most:
        text = f"its aspect ratio is too large: {width} x {height} would have more than {settings.max_tokens} tokens"
        raise UnreadablePicture(text)
    return resized(pixels, *sides, settings.mode)


def _is_large(height: int, width: int, settings: Lfm2Images) -> bool:
    block = settings.patch * settings.merge
    sides = (max(settings.patch, round(side / block) * block) for side in (height, width))
    return next(sides) * next(sides) > settings.max_tokens * block * block * settings.tolerance


def tile_grid(height: int, width: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Tiles across and down, `least` to `most` in all, of the nearest aspect. Of equally near ones the
    larger wins if the picture has more than half of its pixels."""
    area = width * height
    best, nearest = (1, 1), float("inf")
    for across, down in _grids(least, most):
        distance = abs(width / height - across / down)
        if distance < nearest or (distance == nearest and area > 0.5 * tile * tile * across * down):
            best, nearest = (across, down), distance
    return best


@cache
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """By number of tiles, then in the order of transformers' set, which decides between equal ones."""
    counts = range(least, most + 1)
    made = [(w, h) for n in counts for w in range(1, n + 1) for h in range(1, n + 1) if least <= w * h <= most]
    return sorted(set(made), key=lambda grid: grid[0] * grid[1])


def _piece(before: str, picture: torch.Tensor, settings: Lfm2Images) -> ImagePiece:
    """Patches row by row; a patch is y, x, channel."""
    patch = settings.patch
    rows, columns = (side // patch for side in picture.shape[1:])
    parts = picture.reshape(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
    patches = parts.reshape(rows * columns, patch * patch * 3)
    return ImagePiece(before, patches.numpy(), (rows, columns), (rows // settings.merge, columns // settings.merge))
