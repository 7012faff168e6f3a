"""Settings of a checkpoint's image processor: preprocessor_config.json or processor_config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hybridrt.base.config_json import (
    FLAG,
    NULL,
    OBJECT,
    TEXT,
    TRUE,
    FieldType,
    check_fields,
    either,
    integer,
    number,
    read_object,
)
from hybridrt.base.errors import ConfigError, shown
from hybridrt.models.config.read_vision import read_image_processor

MAX_PIXELS = 2**26  # of a resized picture: four times the published maximum
MAX_TILES = 64
MAX_BLOCK = 256  # side of a token in pixels: small pictures are enlarged to one
_MODES = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_PIXELS = integer(1, MAX_PIXELS)
_SMALL = integer(1, 64)
_NULL_OR_TRUE = either(NULL, TRUE)
_COMMON: Mapping[str, FieldType] = {
    "image_processor_type": TEXT,
    "resample": either(NULL, FieldType("2 (bilinear) or 3 (bicubic)", lambda v: type(v) is int and v in _MODES)),
    "do_resize": _NULL_OR_TRUE,
    "do_convert_rgb": _NULL_OR_TRUE,
}


class QwenImages(msgspec.Struct, frozen=True, tag="qwen"):
    """Qwen2-VL's processor, which Qwen3.5 and LFM3-VL use.

    Attributes:
        merge: patches of a side of the block that becomes a token.
        min_pixels, max_pixels: of the resized picture.
        mode: of torch's interpolate.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mode: str


class Lfm2Images(msgspec.Struct, frozen=True, tag="lfm2"):
    """LFM2-VL's processor.

    Attributes:
        merge: patches of a side of the block that becomes a token.
        tile: pixels of a tile's side.
        tolerance: a picture of up to `tolerance * max_tokens` tokens is not cut into tiles.
        marks: whether tokens name the picture's begin, tiles and end.
    """

    patch: int
    merge: int
    tile: int
    min_tiles: int
    max_tiles: int
    thumbnail: bool
    min_tokens: int
    max_tokens: int
    tolerance: float
    marks: bool
    mode: str


class NemotronImages(msgspec.Struct, frozen=True, tag="nemotron"):
    """Nemotron Omni's processor. `merge` as in QwenImages."""

    patch: int
    merge: int
    min_patches: int
    max_patches: int
    mode: str


class NanoVLImages(msgspec.Struct, frozen=True, tag="nano_vl"):
    """Nemotron Nano VL v2's processor. `merge`, `tile` as in Lfm2Images."""

    patch: int
    merge: int
    tile: int
    max_tiles: int
    thumbnail: bool
    mode: str


ImageSettings = QwenImages | Lfm2Images | NemotronImages | NanoVLImages


def read_image_settings(directory: Path) -> ImageSettings | None:
    """The settings of a checkpoint. None: it has no processor of images.

    Raises:
        ConfigError: a file cannot be read, the processor is unknown, or a field cannot be used.
    """
    if (read := read_image_processor(directory)) is None:
        return None
    found, file = read
    check_fields(found, _COMMON, file)
    name = str(found.get("image_processor_type", "")).removesuffix("Fast")
    if name not in _READERS:
        raise ConfigError(
            f"{file}: image_processor_type is {shown(found.get('image_processor_type'))}; hybridrt knows "
            f"{', '.join(_READERS)}: for text alone, load the model with images=False"
        )
    given = {key: value for key, value in found.items() if value is not None}
    if (marks := _marks(directory)) is not None:
        given["use_image_special_tokens"] = marks
    return _READERS[name](given, file)


def _marks(directory: Path) -> bool | None:
    """An option of LFM2-VL's whole processor."""
    file = directory / "processor_config.json"
    whole = read_object(file) if file.exists() else {}
    check_fields(whole, {"use_image_special_tokens": either(NULL, FLAG)}, file)
    return whole.get("use_image_special_tokens")


def _qwen(given: Mapping[str, Any], file: Path) -> QwenImages:
    size = given.get("size", {})
    check_fields({"size": size}, {"size": OBJECT}, file)
    names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    pixels = {name: given.get(name, size.get(edge)) for edge, name in names.items()}
    defaults = {"patch_size": 14, "merge_size": 2, "resample": 3}
    defaults |= {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    fields = {**defaults, **given, **{name: value for name, value in pixels.items() if value is not None}}
    kinds = dict.fromkeys(("min_pixels", "max_pixels"), _PIXELS)
    check_fields(fields, kinds | dict.fromkeys(("patch_size", "merge_size"), _SMALL), file)
    _check_order(fields, "min_pixels", "max_pixels", file)
    _check_block("patch_size", fields["patch_size"], fields["merge_size"], file)
    return QwenImages(
        patch=fields["patch_size"],
        merge=fields["merge_size"],
        min_pixels=fields["min_pixels"],
        max_pixels=fields["max_pixels"],
        mode=_MODES[fields["resample"]],
    )


_LFM2_DEFAULTS = {
    "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True,
    "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512,
    "max_pixels_tolerance": 2.0, "resample": 2, "use_image_special_tokens": True,
}  # fmt: skip
_LFM2_FIELDS: Mapping[str, FieldType] = {
    **dict.fromkeys(("downsample_factor", "encoder_patch_size"), _SMALL),
    **dict.fromkeys(("do_image_splitting", "use_thumbnail", "use_image_special_tokens"), FLAG),
    **dict.fromkeys(("min_tiles", "max_tiles"), integer(1, MAX_TILES)),
    **dict.fromkeys(("min_image_tokens", "max_image_tokens"), integer(1, 2**16)),
    "tile_size": integer(1, 4096),
    "max_pixels_tolerance": number(1.0, 64.0),
}


def _lfm2(given: Mapping[str, Any], file: Path) -> Lfm2Images:
    fields = {**_LFM2_DEFAULTS, **given}
    check_fields(fields, _LFM2_FIELDS, file)
    _check_order(fields, "min_tiles", "max_tiles", file)
    _check_order(fields, "min_image_tokens", "max_image_tokens", file)
    block = fields["encoder_patch_size"] * fields["downsample_factor"]
    _check_block("encoder_patch_size", fields["encoder_patch_size"], fields["downsample_factor"], file)
    _check_area("max_image_tokens", fields["max_image_tokens"], block, file)
    _check_area("max_tiles", fields["max_tiles"], fields["tile_size"], file)
    if fields["tile_size"] % block:
        raise ConfigError(f"{file}: tile_size is {fields['tile_size']}; it must be a multiple of {block}")
    splits = fields["do_image_splitting"]
    return Lfm2Images(
        patch=fields["encoder_patch_size"],
        merge=fields["downsample_factor"],
        tile=fields["tile_size"],
        min_tiles=fields["min_tiles"] if splits else 1,
        max_tiles=fields["max_tiles"] if splits else 1,
        thumbnail=fields["use_thumbnail"],
        min_tokens=fields["min_image_tokens"],
        max_tokens=fields["max_image_tokens"],
        tolerance=float(fields["max_pixels_tolerance"]),
        marks=fields["use_image_special_tokens"],
        mode=_MODES[fields["resample"]],
    )


_NEMOTRON_DEFAULTS = {
    "patch_size": 16, "downsample_ratio": 0.5, "min_num_patches": 1024, "max_num_patches": 13312,
    "max_model_len": 16384, "resample": 3,
}  # fmt: skip
_NEMOTRON_FIELDS: Mapping[str, FieldType] = {
    "patch_size": _SMALL,
    "downsample_ratio": number(1 / 64, 1),
    "min_num_patches": integer(1, 2**16),
    "max_num_patches": integer(0, 2**16),
    "max_model_len": integer(8, 2**24),
}


def _nemotron(given: Mapping[str, Any], file: Path) -> NemotronImages:
    """The context length limits patches, too."""
    fields = {**_NEMOTRON_DEFAULTS, **given}
    check_fields(fields, _NEMOTRON_FIELDS, file)
    merge = round(1 / fields["downsample_ratio"])
    _check_block("patch_size", fields["patch_size"], merge, file)
    _check_area("min_num_patches", fields["min_num_patches"], fields["patch_size"], file)
    least, most = fields["min_num_patches"], (fields["max_model_len"] - 4) * merge**2
    most = max(min(most, fields["max_num_patches"] or most, MAX_PIXELS // fields["patch_size"] ** 2), least)
    return NemotronImages(fields["patch_size"], merge, least, most, _MODES[fields["resample"]])


_NANO_VL_DEFAULTS = {
    "image_size": 512, "patch_size": 16, "downsample_ratio": 0.5, "max_num_tiles": 12, "use_thumbnail": True,
}  # fmt: skip
_NANO_VL_FIELDS: Mapping[str, FieldType] = {
    "image_size": integer(1, 4096),
    "patch_size": _SMALL,
    "downsample_ratio": number(1 / 64, 1),
    "max_num_tiles": integer(1, MAX_TILES),
    "use_thumbnail": FLAG,
}


def _nano_vl(given: Mapping[str, Any], file: Path) -> NemotronImages | NanoVLImages:
    """Models whose config.json limits patches have one piece a picture, as Nemotron Omni has."""
    if (limits := _patch_limits(file.with_name("config.json"))) is not None:
        return _nemotron({**given, **limits}, file)
    fields = {**_NANO_VL_DEFAULTS, **given}
    check_fields(fields, _NANO_VL_FIELDS, file)
    patch, merge, tile = fields["patch_size"], round(1 / fields["downsample_ratio"]), fields["image_size"]
    _check_block("patch_size", patch, merge, file)
    _check_area("max_num_tiles", fields["max_num_tiles"], tile, file)
    if tile % (patch * merge):
        raise ConfigError(f"{file}: image_size is {tile}; it must be a multiple of {patch * merge}")
    return NanoVLImages(patch, merge, tile, fields["max_num_tiles"], fields["use_thumbnail"], _MODES[3])


def _patch_limits(file: Path) -> dict[str, Any] | None:
    """min_num_patches and max_num_patches of a tower's arguments."""
    found = read_object(file).get("vision_config") if file.exists() else None
    arguments = found.get("args") if isinstance(found, Mapping) else None
    if not isinstance(arguments, Mapping) or arguments.get("min_num_patches") is None:
        return None
    return {
        name: value for name in ("min_num_patches", "max_num_patches") if (value := arguments.get(name)) is not None
    }


def _check_order(fields: Mapping[str, Any], low: str, high: str, file: Path) -> None:
    if fields[low] > fields[high]:
        raise ConfigError(f"{file}: {low} is {fields[low]}; it must be at most {high}, {fields[high]}")


def _check_block(name: str, patch: int, merge: int, file: Path) -> None:
    if patch * merge > MAX_BLOCK:
        raise ConfigError(
            f"{file}: {name} is {patch}; a token of {merge} x {merge} patches may have {MAX_BLOCK} pixels a side: it "
            f"must be at most {MAX_BLOCK // merge}"
        )


def _check_area(name: str, count: int, side: int, file: Path) -> None:
    if count * side * side > MAX_PIXELS:
        raise ConfigError(
            f"{file}: {name} is {count}, each of {side} x {side} pixels; it must be at most {MAX_PIXELS // side**2}"
        )


_READERS: dict[str, Callable[[Mapping[str, Any], Path], ImageSettings]] = {
    "Qwen2VLImageProcessor": _qwen, "Lfm2VlImageProcessor": _lfm2,
    "NemotronH_Omni_Reasoning_V3ImageProcessor": _nemotron,
    "NemotronH_Nano_Omni_Reasoning_V3ImageProcessor": _nemotron,
    "NemotronNanoVLV2ImageProcessor": _nano_vl,
}  # fmt: skip
