"""Patches of pictures, compared with transformers' processors bit by bit, and with fixed vectors."""

import sys
from hashlib import sha256
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace

from hybridrt.images.jobs import UnreadablePicture
from hybridrt.images.lfm2 import lfm2_pieces
from hybridrt.images.nano_vl import nano_vl_pieces
from hybridrt.images.nemotron import nemotron_pieces
from hybridrt.images.pieces import ImagePiece
from hybridrt.images.qwen import qwen_pieces
from hybridrt.images.settings import Lfm2Images, NanoVLImages, NemotronImages, QwenImages
from tests.support.pictures import noise

QWEN = QwenImages(patch=16, merge=2, min_pixels=64 * 64, max_pixels=256 * 256, mode="bicubic")
LFM2 = Lfm2Images(
    patch=16, merge=2, tile=64, min_tiles=2, max_tiles=4, thumbnail=True, min_tokens=4, max_tokens=16, tolerance=2.0,
    marks=True, mode="bilinear",
)  # fmt: skip
SIZES = [
    (96, 64),
    (97, 75),
    (19, 23),
    (1, 1),
    (500, 340),
    (16, 300),
    (300, 16),
    (340, 500),
    (256, 256),
    (48, 80),
    (33, 31),
]


def picture(width: int, height: int) -> torch.Tensor:
    return torch.from_numpy(noise(width * 31 + height, width, height)).permute(2, 0, 1)


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """transformers with torchvision. PyPI's wants operators of CUDA's libraries; to declare them is enough."""
    try:
        import torchvision
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

        torchvision.kept = library  # type: ignore[attr-defined]
    import transformers

    return transformers


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """What was normalised with mean and deviation 0.5."""
    return (values * 127.5 + 127.5).round().to(torch.uint8).numpy()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_qwen_patches_are_those_of_transformers(transformers: ModuleType, width: int, height: int) -> None:
    size = {"shortest_edge": QWEN.min_pixels, "longest_edge": QWEN.max_pixels}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, temporal_patch_size=2, size=size, **half
    )
    pixels = picture(width, height)
    (piece,) = qwen_pieces(pixels, QWEN, low=False)
    found = processor([pixels], return_tensors="pt")
    assert found["image_grid_thw"].tolist() == [[1, *piece.grid]]
    frames = as_bytes(found["pixel_values"]).reshape(-1, 3, 2, 256)
    for frame in range(2):
        np.testing.assert_array_equal(piece.patches, frames[:, :, frame].reshape(-1, 768))


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_lfm2_patches_are_those_of_transformers(
    transformers: ModuleType, width: int, height: int, splits: bool
) -> None:
    settings = LFM2 if splits else replace(LFM2, min_tiles=1, max_tiles=1)
    processor = transformers.Lfm2VlImageProcessor(
        tile_size=64, min_tiles=2, max_tiles=4, min_image_tokens=4, max_image_tokens=16, encoder_patch_size=16,
        downsample_factor=2, use_thumbnail=True, do_image_splitting=splits, max_pixels_tolerance=2.0,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    pixels = picture(width, height)
    pieces = lfm2_pieces(pixels, settings, low=False)
    found = processor([[pixels]], return_tensors="pt")
    assert found["spatial_shapes"].tolist() == [list(piece.grid) for piece in pieces]
    for i, piece in enumerate(pieces):
        values = found["pixel_values"][i][: len(piece.patches)]
        np.testing.assert_array_equal(piece.patches, as_bytes(values))


NEMOTRON = NemotronImages(patch=16, merge=2, min_patches=16, max_patches=256, mode="bicubic")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nemotron_patches_are_those_of_transformers(transformers: ModuleType, width: int, height: int) -> None:
    name = "NemotronH_Omni_Reasoning_V3ImageProcessor"
    if not hasattr(transformers, name):
        pytest.skip("this transformers does not know the family")
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = getattr(transformers, name)(min_num_patches=16, max_num_patches=256, **half)
    pixels = picture(width, height)
    (piece,) = nemotron_pieces(pixels, NEMOTRON, low=False)
    found = processor([pixels], return_tensors="pt")
    assert found["image_grid_hw"].tolist() == [list(piece.grid)]
    assert piece.patches.dtype == np.float32
    values = (torch.from_numpy(piece.patches) - 127.5) / 127.5
    torch.testing.assert_close(values, found["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "height", "grid"), [(64, 64, (1, 1)), (200, 90, (2, 1)), (40, 200, (1, 4)), (150, 140, (2, 2))]
)
def test_nano_vl_cuts_tiles_of_the_nearest_aspect(width: int, height: int, grid: tuple[int, int]) -> None:
    """A resize in float32, tiles cut out of it row by row, and the whole picture."""
    settings, pixels = NanoVLImages(16, 2, 64, 4, True, "bicubic"), picture(width, height)
    pieces = nano_vl_pieces(pixels, settings, low=False)

    def cut(across: int, down: int) -> list[torch.Tensor]:
        sides = 64 * down, 64 * across
        whole = F.interpolate(pixels[None].float(), sides, mode="bicubic", antialias=True)[0]
        places = [(row, column) for row in range(0, sides[0], 64) for column in range(0, sides[1], 64)]
        return [whole[:, row : row + 64, column : column + 64] for row, column in places]

    wanted = [*cut(*grid), *(cut(1, 1) if grid != (1, 1) else [])]
    assert [piece.tokens for piece in pieces] == [(2, 2)] * len(wanted)
    for piece, tile in zip(pieces, wanted, strict=True):
        for place in range(16):
            y, x = 16 * (place // 4), 16 * (place % 4)
            found = torch.from_numpy(piece.patches[place]).view(3, 16, 16)
            torch.testing.assert_close(found, tile[:, y : y + 16, x : x + 16], rtol=0, atol=1e-4)
    assert len(nano_vl_pieces(pixels, settings, low=True)) == 1


# Computed once, with torch 2.13 and equal to transformers 5.23.
def fingerprint(pieces: list[ImagePiece]) -> str:
    hashed = sha256()
    for piece in pieces:
        hashed.update(
            f"{piece.before} {piece.grid} {piece.tokens} ".encode() + np.ascontiguousarray(piece.patches).tobytes()
        )
    return hashed.hexdigest()[:16]


@pytest.mark.parametrize(
    ("width", "height", "qwen", "lfm2"),
    [
        (96, 64, "2f3eb77eef5adb22", "a8e7caa4803c053b"),
        (97, 75, "1b0922235a68e623", "062f3c91a7c67ba2"),
        (500, 340, "8095f98fad810884", "53b514a1f589a862"),
    ],
)
def test_patches_stay_as_they_were(width: int, height: int, qwen: str, lfm2: str) -> None:
    pixels = picture(width, height)
    assert fingerprint(qwen_pieces(pixels, QWEN, low=False)) == qwen
    assert fingerprint(lfm2_pieces(pixels, LFM2, low=False)) == lfm2


def test_a_large_picture_of_lfm2_is_tiles_and_a_thumbnail() -> None:
    pieces = lfm2_pieces(picture(500, 340), LFM2, low=False)
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)]
    assert [piece.before for piece in pieces] == [*tiles, "<|img_thumbnail|>"]
    assert [piece.tokens for piece in pieces] == [*[(2, 2)] * 4, (3, 4)]


def test_low_detail_has_fewer_pixels_and_never_more_than_the_model() -> None:
    large = QwenImages(patch=16, merge=2, min_pixels=64 * 64, max_pixels=2**22, mode="bicubic")
    (high,), (low,) = (qwen_pieces(picture(1024, 1024), large, low) for low in (False, True))
    assert (high.tokens, low.tokens) == ((32, 32), (16, 16))
    assert [p.tokens for p in qwen_pieces(picture(1024, 1024), QWEN, low=True)] == [(8, 8)]
    assert len(lfm2_pieces(picture(500, 340), LFM2, low=True)) == 1


def test_an_impossible_aspect_is_refused() -> None:
    assert qwen_pieces(picture(400, 2), QWEN, low=False)
    with pytest.raises(UnreadablePicture, match="aspect ratio is above 200"):
        qwen_pieces(picture(402, 2), QWEN, low=False)
    with pytest.raises(UnreadablePicture, match="less than a patch"):
        nemotron_pieces(picture(9000, 1), NEMOTRON, low=False)
    with pytest.raises(UnreadablePicture, match="more than 16 tokens"):
        lfm2_pieces(picture(3000, 16), LFM2, low=False)
    tiles = lfm2_pieces(picture(3000, 16), replace(LFM2, thumbnail=False), low=False)
    assert [piece.tokens for piece in tiles] == [(2, 2)] * 4  # none is the whole picture
