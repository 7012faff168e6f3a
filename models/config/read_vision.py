"""Reads the fields of a vision tower: vision_config, and normalisation from the image processor."""

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

from hybridrt.base.config_fields import ROPE
from hybridrt.base.config_json import (
    NULL,
    OBJECT,
    TRUE,
    FieldType,
    check_fields,
    either,
    list_of,
    number,
    one_of,
    read_object,
)
from hybridrt.base.errors import ConfigError
from hybridrt.base.vision import VisionSpec
from hybridrt.models.config.family import Family

NORMS = {
    **dict.fromkeys(("image_mean", "norm_mean"), either(NULL, list_of(number(0, 1), 3))),
    **dict.fromkeys(("image_std", "norm_std"), either(NULL, list_of(number(1e-3, 1e3), 3))),
    "rescale_factor": FieldType("1/255", lambda v: v is None or (type(v) is float and abs(255 * v - 1) < 1e-3)),
    **dict.fromkeys(("do_rescale", "do_normalize"), either(NULL, TRUE)),
}


def read_image_processor(path: Path) -> tuple[dict[str, Any], Path] | None:
    """The fields of a checkpoint's image processor, and their file; None: it has none.

    Published checkpoints have preprocessor_config.json. transformers 5 writes
    processor_config.json, with an object `image_processor`.

    Raises:
        ConfigError: the file cannot be read.
    """
    joined, own = path / "processor_config.json", path / "preprocessor_config.json"
    if joined.exists():
        fields = read_object(joined)
        check_fields(fields, {"image_processor": either(NULL, OBJECT)}, joined)
        if fields.get("image_processor") is not None:
            return dict(fields["image_processor"]), joined
    return (read_object(own), own) if own.exists() else None


def read_vision(path: Path, raw: Mapping[str, Any], family: Family, hidden_size: int) -> VisionSpec | None:
    """The tower of a checkpoint with config.json `raw`. None: hybridrt runs the family's text part
    only, or the checkpoint has no tower, no placeholder of images or no image processor.

    Raises:
        ConfigError: fields that cannot be used.
    """
    file = path / "config.json"
    check_fields(raw, {"vision_config": either(NULL, OBJECT)}, file)
    if family.vision is None or raw.get("vision_config") is None or (found := read_image_processor(path)) is None:
        return None
    processor, processor_file = found
    check_fields(processor, NORMS, processor_file)
    token = raw.get("image_token_id", family.defaults.get("image_token_id"))
    if token is None:
        return None
    raw = {**raw, "image_token_id": token}
    try:
        spec = family.vision(raw, hidden_size)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    return replace(
        spec,
        mean=tuple(processor.get("image_mean") or processor.get("norm_mean") or spec.mean),
        std=tuple(processor.get("image_std") or processor.get("norm_std") or spec.std),
    )


def table_side(name: str, entries: int) -> int:
    """Rows and columns of a table of positions. ConfigError unless it is a square."""
    if isqrt(entries) ** 2 != entries:
        raise ConfigError(f"vision_config: {name} is {entries}; it must be a square number")
    return isqrt(entries)


def rope_theta(fields: Mapping[str, Any], default: float) -> float:
    """The base of a tower's rotary embeddings, which turn by row and column. ConfigError."""
    found = fields.get("rope_parameters") or {}
    check_fields({"rope_parameters": found}, {"rope_parameters": OBJECT}, "vision_config")
    known = {"rope_type": either(NULL, one_of("axial", "default")), "rope_theta": either(NULL, ROPE["rope_theta"])}
    check_fields(found, known, "vision_config: rope_parameters")
    return float(found.get("rope_theta") or default)
