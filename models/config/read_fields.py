"""Reads config.json fields as transformers does, with defaults, older names and derived fields.

transformers itself takes seconds to import, and may change its defaults.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridrt.base.config_json import NULL, OBJECT, check_fields, either
from hybridrt.base.errors import ConfigError, shown
from hybridrt.models.config.family import Family, current_kind

LAYER_LISTS = {"layer_types", "layers_block_type", "mlp_layer_types"}
# Defaults that `derive` replaces.
OPEN = (None, "auto")
# Scaled from the training length.
SCALED_FROM_LENGTH = ("llama3", "longrope", "yarn")


def read_fields(raw: Mapping[str, Any], family: Family, file: Path) -> SimpleNamespace:
    """The object for `Family.describe`: the fields of config.json, with defaults.

    Raises:
        ConfigError: the file is of another type of model, or fields cannot be used.
    """
    if raw.get("model_type", family.model_type) != family.model_type:
        raise ConfigError(
            f"{file}: model_type is {shown(raw['model_type'])}, but {family.architecture} goes with "
            f"{family.model_type!r}"
        )
    fields = {**family.defaults, **raw}
    for older in family.older.keys() & fields.keys():
        name, value = family.older[older], fields.pop(older)
        if value is not None or family.defaults.get(name) is not None:
            fields[name] = value
    if fields.get("num_key_value_heads", 0) is None:
        fields["num_key_value_heads"] = fields.get("num_attention_heads")
    for name in (LAYER_LISTS | {"mtp_layers_block_type"}) & family.fields.keys():
        if isinstance(kinds := fields.get(name), list):
            fields[name] = [current_kind(kind) for kind in kinds]
    left = {name for name, value in family.defaults.items() if value in OPEN and fields[name] in (None, value)}
    check_fields({k: v for k, v in fields.items() if k not in left}, family.fields, file)
    try:
        _derive(fields, family)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    return SimpleNamespace(**fields)


def _derive(fields: dict[str, Any], family: Family) -> None:
    if family.derive is not None:
        family.derive(fields)
    if "rope_parameters" in family.defaults:
        fields["rope_parameters"] = _rope(fields, family.rope_kinds)
    for name in LAYER_LISTS & family.fields.keys():
        kinds, count = fields.get(name), fields["num_hidden_layers"]
        if kinds is not None and len(kinds) != count:
            raise ConfigError(f"{name} has {len(kinds)} entries; there must be one for each of the {count} layers")


def _rope(fields: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Merges rope_parameters, rope_scaling, rope_theta and partial_rotary_factor into one dict, or
    into one for each of `kinds`."""
    check_fields(fields, dict.fromkeys(("rope_parameters", "rope_scaling"), either(NULL, OBJECT)), "rope")
    rope = dict(fields.pop("rope_scaling", None) or fields["rope_parameters"] or {})
    theta, part = fields.pop("rope_theta", 10000.0), fields.pop("partial_rotary_factor", None)
    if not kinds:
        if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
            raise ConfigError(f"rope_parameters holds an object, {shown(nested[0])}; all layers here rotate in one way")
        return _completed(rope, theta, part, fields)
    check_fields(rope, dict.fromkeys(rope.keys() & set(kinds), either(NULL, OBJECT)), "rope_parameters")
    return {name: _completed(dict(rope[name]), theta, part, fields) for name in kinds if rope.get(name) is not None}


def _completed(rope: dict[str, Any], theta: Any, part: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to `rope` what other fields say, and defaults."""
    rope.setdefault("rope_theta", theta)
    if part is not None:
        rope.setdefault("partial_rotary_factor", part)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if kind in SCALED_FROM_LENGTH:
        length = fields.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            length or rope.get("original_max_position_embeddings") or fields["max_position_embeddings"]
        )
    return rope
