"""Settings of processors: published fields, defaults, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrt.base.errors import ConfigError
from hybridrt.images.settings import Lfm2Images, NanoVLImages, NemotronImages, QwenImages, read_image_settings

QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
LFM2 = {"image_processor_type": "Lfm2VlImageProcessor"}
NEMOTRON = {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor"}
NANO_VL = {"image_processor_type": "NemotronNanoVLV2ImageProcessor"}


def read(directory: Path, fields: dict[str, Any], **whole: Any) -> Any:
    if whole:
        (directory / "processor_config.json").write_text(json.dumps({"image_processor": fields, **whole}))
    else:
        (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    return read_image_settings(directory)


def test_published_fields_and_defaults(tmp_path: Path) -> None:
    assert read_image_settings(tmp_path) is None
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    assert read(tmp_path, QWEN | {"size": size}) == QwenImages(16, 2, 65536, 16777216, "bicubic")
    limits = {"min_pixels": 4096, "max_pixels": 8192, "resample": 2}
    assert read(tmp_path, QWEN | {"size": size} | limits) == QwenImages(16, 2, 4096, 8192, "bilinear")
    assert read(tmp_path, LFM2) == Lfm2Images(16, 2, 512, 2, 10, True, 64, 256, 2.0, True, "bilinear")


def test_nemotron_has_a_budget_of_patches(tmp_path: Path) -> None:
    fields = {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "norm_mean": [0.5] * 3}
    assert read(tmp_path, fields) == NemotronImages(16, 2, 1024, 13312, "bicubic")
    limits = {"max_model_len": 1028, "max_num_patches": 0}
    assert read(tmp_path, fields | limits) == NemotronImages(16, 2, 1024, 4096, "bicubic")


def test_nano_vl_has_tiles_unless_the_model_limits_patches(tmp_path: Path) -> None:
    fields = NANO_VL | {"image_size": 448, "patch_size": 14}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"args": {"model": "vit_huge_patch16_224"}}}))
    assert read(tmp_path, fields) == NanoVLImages(14, 2, 448, 12, True, "bicubic")
    arguments = {"min_num_patches": 256, "max_num_patches": 512}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"args": arguments}}))
    assert read(tmp_path, NANO_VL) == NemotronImages(16, 2, 256, 512, "bicubic")


def test_the_whole_processors_file_comes_first(tmp_path: Path) -> None:
    read(tmp_path, QWEN)
    fields = LFM2 | {"do_image_splitting": False}
    found = read(tmp_path, fields, use_image_special_tokens=False)
    assert found == Lfm2Images(16, 2, 512, 1, 1, True, 64, 256, 2.0, False, "bilinear")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor'; hybridrt knows Qwen2VLImageProcessor"),
        ({"patch_size": 16}, "image_processor_type is None"),
        (QWEN | {"patch_size": 0}, "patch_size is 0"),
        (QWEN | {"size": 5}, "size is 5"),
        (QWEN | {"max_pixels": 2**40}, "max_pixels is 1099511627776"),
        (QWEN | {"min_pixels": 9999999}, "min_pixels is 9999999; it must be at most max_pixels"),
        (QWEN | {"resample": 1}, "resample is 1; it must be"),
        (QWEN | {"do_resize": False}, "do_resize is False"),
        (LFM2 | {"max_tiles": 1000}, "max_tiles is 1000"),
        (LFM2 | {"tile_size": 100}, "tile_size is 100; it must be a multiple of 32"),
        (LFM2 | {"min_tiles": 9, "max_tiles": 4}, "min_tiles is 9; it must be at most max_tiles, 4"),
        (LFM2 | {"tile_size": 4096, "max_tiles": 8}, "max_tiles is 8, each of 4096 x 4096 .* at most 4$"),
        (LFM2 | {"max_image_tokens": 65536, "encoder_patch_size": 32}, "max_image_tokens is 65536.* at most 16384$"),
        (LFM2 | {"encoder_patch_size": 64, "downsample_factor": 8}, "encoder_patch_size is 64.* at most 32$"),
        (QWEN | {"patch_size": 64, "merge_size": 64}, "patch_size is 64.* at most 4$"),
        (NEMOTRON | {"min_num_patches": 2**16, "patch_size": 64}, "min_num_patches is 65536.* at most 16384$"),
        (NEMOTRON | {"downsample_ratio": 1 / 64}, "patch_size is 16.* at most 4$"),
        (NANO_VL | {"image_size": 500}, "image_size is 500; it must be a multiple of 32"),
        (NANO_VL | {"image_size": 4096}, "max_num_tiles is 12.* at most 4$"),
    ],
    ids=range(19),
)
def test_fields_that_cannot_be_used_are_refused(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(tmp_path, fields)
