"""Reads a Hugging Face config.json into a ModelConfig: the part that all families share.

The file is not trusted: `config_fields` checks fields before use. No code of a checkpoint is
imported.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrt.base.config_fields import EOS, MAX_LAYERS, MAX_WIDTH, NAMES, RAW, ROPE
from hybridrt.base.config_json import NULL, check_fields, either, integer, read_object
from hybridrt.base.dtypes import DTYPES
from hybridrt.base.errors import BackendError, ConfigError, UnsupportedModelError, shown
from hybridrt.base.model_config import AttentionConfig, ModelConfig
from hybridrt.kinds.registry import state_shape
from hybridrt.models.config.family import Family, FamilyFields, check_experts, routed_experts
from hybridrt.models.config.family_registry import family_of
from hybridrt.models.config.read_fields import read_fields
from hybridrt.models.config.read_quant import read_quant_config
from hybridrt.models.config.read_vision import read_vision

_GGUF = re.compile(r"[.\-_]gguf/?$", re.IGNORECASE)
# Models without positions have this.
UNLIMITED_POSITIONS = 2**20


def read_model_config(path: Path) -> ModelConfig:
    """Reads config.json of a checkpoint directory, and end-of-sequence ids of
    generation_config.json.

    Raises:
        ConfigError: no such directory, no config.json, or fields that cannot be used.
        UnsupportedModelError: the architecture is not one of `hybridrt.models`.
        BackendError: its family reads a field that has no value.
    """
    file = path / "config.json"
    raw = _read_config(path)
    check_fields(raw, NAMES, file)
    family = _family(path, raw)
    check_fields(raw, RAW, file)
    raw |= {name: raw[older] for older, name in family.outer_older.items() if raw.get(older) is not None}
    images = _image_tokens(raw, family, file)
    whole = raw
    raw = _text_part(raw, family, file)
    quant = read_quant_config(path, whole, raw)
    raw = family.rewrite(raw, file) if family.rewrite else raw
    hf = family.read(raw, file) if family.read else read_fields(raw, family, file)
    check_fields(hf, family.fields, file)
    _check_activation(hf, family.activation, path)
    fields = _described(family, hf, file)
    for attention in _attentions(fields):
        _check_rope(attention, file)
    if "sliding_window" not in family.fields:
        _check_window(raw, fields, file)
    _check_sizes(fields, file)
    if any(layer.ffn == "moe" for layer in (*fields["layers"], *fields.get("mtp_layers", ()))):
        check_experts(hf, routed_experts(hf), hf.num_experts_per_tok, path)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        max_position_embeddings=getattr(hf, "max_position_embeddings", None) or UNLIMITED_POSITIONS,
        dtype=DTYPES[raw.get("dtype") or raw.get("torch_dtype") or "float32"],
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=_eos_ids(path, raw),
        hf=hf,
        image_tokens=images,
        vision=read_vision(path, whole, family, hf.hidden_size),
        quant=quant,
        **fields,
    )


def _described(family: Family, hf: Any, file: Path) -> FamilyFields:
    try:
        return family.describe(hf)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    except AttributeError as e:
        if e.obj is not hf:
            raise
        raise BackendError(
            f"the family of {family.architecture} reads {e.name}, which {file} does not have; give it a default, and a "
            "type in `fields`"
        ) from e


def _text_part(raw: dict[str, Any], family: Family, file: Path) -> dict[str, Any]:
    """Completes the section of a model with images from the whole file."""
    if family.section is None:
        return raw
    text = raw.get(family.section)
    if not isinstance(text, dict):
        raise ConfigError(f"{file}: {family.section} is {shown(text)}; it must describe the model's text part")
    check_fields(text, RAW, file)
    common = ("architectures", "dtype", "torch_dtype", "eos_token_id")
    outer = {name: raw[name] for name in common if name in raw}
    # The output head belongs to the whole model.
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return outer | text | tied


def _image_tokens(raw: Mapping[str, Any], family: Family, file: Path) -> dict[int, str]:
    tokens = {name: raw.get(name, family.defaults.get(name)) for name in family.image_tokens}
    check_fields(tokens, dict.fromkeys(tokens, either(NULL, integer(0, 2**31 - 1))), file)
    return {token: name for name, token in tokens.items() if token is not None}


def _attentions(fields: FamilyFields) -> list[AttentionConfig]:
    layers = (*fields["layers"], *fields.get("mtp_layers", ()))
    return [fields["attention"], *(a for layer in layers if isinstance(a := layer.attention, AttentionConfig))]


def _check_rope(attention: AttentionConfig, file: Path) -> None:
    parameters = attention.rope or {}
    required = {"rope_theta", *parameters} if attention.rope is not None else set()
    check_fields({name: parameters.get(name) for name in required}, ROPE, f"{file}: rope_parameters")
    # Odd numbers are rounded up to pairs, as in transformers.
    size = attention.rotary_dim
    rotated = int(size * (parameters.get("partial_rotary_factor") or 1.0))
    if parameters.get("rope_type") == "proportional":  # all pairs are turned, some by an angle of zero
        rotated = size
    if required and (rotated < 1 or rotated + rotated % 2 > size):
        raise ConfigError(
            f"{file}: rotary embeddings would turn {rotated} of {size} numbers of a head (head_dim, or "
            "qk_rope_head_dim, by partial_rotary_factor); they turn pairs"
        )


def _check_window(raw: Mapping[str, Any], fields: FamilyFields, file: Path) -> None:
    asked = raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False
    if asked and all(attention.sliding_window is None for attention in _attentions(fields)):
        raise ConfigError(
            f"{file}: sliding_window is {shown(raw['sliding_window'])}; hybridrt runs this architecture without a "
            "sliding window only"
        )


def _check_sizes(fields: FamilyFields, file: Path) -> None:
    """Checks products: each size alone may be allowed."""
    widths = {"attention heads x head_dim": max(a.num_heads * a.head_dim for a in _attentions(fields))}
    for kind, linear in fields["linear"].items():
        widths |= {f"the width of {name} ({kind})": width for name, width in state_shape(linear).segments}
    attends = any(layer.attention for layer in fields["layers"])
    for what, width in widths.items():
        low = 0 if what.startswith("attention") and not attends else 1
        if not low <= width <= MAX_WIDTH:
            raise ConfigError(f"{file}: {what} is {width}; it must be from {low} to {MAX_WIDTH}")
    if not 1 <= len(fields["layers"]) <= MAX_LAYERS:
        raise ConfigError(f"{file} describes {len(fields['layers'])} layers; there must be 1 to {MAX_LAYERS}")


def _check_activation(hf: Any, activation: str, path: Path) -> None:
    for name, known in (("hidden_act", activation), ("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
        if getattr(hf, name, known) not in ((known, "swish") if known == "silu" else (known,)):
            raise ConfigError(f"{path}: {name} is {shown(getattr(hf, name))}; hybridrt implements {known!r}")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; pass a checkpoint directory or a hub name such as org/model")
    if (path / "adapter_config.json").exists():
        raise ConfigError(
            f"{path} has an adapter_config.json: adapters (LoRA) are not supported; merge it into its model"
        )
    _refuse_gguf_files(path)
    if not file.exists():
        raise ConfigError(f"{path} has no config.json; is it a Hugging Face checkpoint directory?")
    return read_object(file)


def refuse_gguf(name: str | Path) -> None:
    """UnsupportedModelError if the name is that of a GGUF file or repository."""
    if _GGUF.search(str(name)):
        raise UnsupportedModelError(
            f"{name} is a model in the format GGUF, which hybridrt does not read: pass the checkpoint that it was made "
            "from, a directory with config.json and *.safetensors or its hub name"
        )


def _refuse_gguf_files(path: Path) -> None:
    if not any(path.glob("*.safetensors")):
        for found in sorted(path.glob("*.[gG][gG][uU][fF]"))[:1]:
            refuse_gguf(found)


def _family(path: Path, raw: Mapping[str, Any]) -> Family:
    try:
        return family_of((raw.get("architectures") or [""])[0])
    except UnsupportedModelError as e:
        text = f"{path}: {e}"
        if raw.get("auto_map"):
            text += (
                ". Its config.json asks for trust_remote_code=True: auto_map names Python code of the checkpoint, and "
                "hybridrt never runs such code"
            )
        raise UnsupportedModelError(text) from e


def _eos_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads generation_config.json first: chat models list end-of-turn ids there."""
    file = path / "generation_config.json"
    generation = read_object(file) if file.exists() else {}
    check_fields(generation, EOS, file)
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
