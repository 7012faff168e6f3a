"""Reads a Hugging Face config.json into a ModelConfig. One function a family; transformers normalises spellings.

Nothing in the file is trusted: fields are compared with `config_kinds` before they are used, and no code that the
checkpoint brings is ever imported.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridrt.config import DTYPES, AttentionConfig, LayerSpec, ModelConfig
from hybridrt.config_json import check_fields, read_object
from hybridrt.config_kinds import EOS, KINDS, MAX_LAYERS, MAX_WIDTH, RAW, ROPE
from hybridrt.errors import ConfigError, UnsupportedModelError, shown
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.plugins import load_object

FamilyFields = dict[str, Any]
# Longest request of a model whose config.json sets no limit, since nothing in it counts positions.
UNLIMITED_POSITIONS = 2**20


def read_model_config(path: Path) -> ModelConfig:
    """Reads config.json (and generation_config.json for end-of-sequence ids) of a checkpoint directory.

    Raises:
        ConfigError: no such directory, no config.json, or fields that cannot be used.
        UnsupportedModelError: the architecture is not one of `hybridrt.models`.
    """
    file = path / "config.json"
    raw = _read_config(path)
    check_fields(raw, RAW, file)
    architecture = _architecture(path, raw)
    if raw.get("quantization_config"):
        raise ConfigError(f"{path} has a quantization_config; use the unquantised checkpoint that it was made from")
    own = OWN_FAMILIES.get(architecture)
    hf = load_object(own).from_json(raw, file) if own else _transformers_config(path, raw)
    check_fields(hf, KINDS.get(architecture, {}), file)
    _check_activation(hf, path)
    try:
        fields = hf.family_fields() if own else FAMILIES[architecture](hf)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    _check_rope(fields["attention"], file)
    _check_sizes(fields, file)
    if any(layer.ffn == "moe" for layer in fields["layers"]):
        _check_experts(hf, path)
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        max_position_embeddings=getattr(hf, "max_position_embeddings", None) or UNLIMITED_POSITIONS,
        dtype=_dtype(raw),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=_eos_ids(path, raw),
        hf=hf,
        **fields,
    )


def _falcon_h1(hf: Any) -> FamilyFields:
    d_ssm = hf.mamba_d_ssm if hf.mamba_d_ssm is not None else int(hf.mamba_expand * hf.hidden_size)
    mamba = Mamba2Config(
        num_heads=hf.mamba_n_heads,
        head_dim=d_ssm // hf.mamba_n_heads,
        state_size=hf.mamba_d_state,
        n_groups=hf.mamba_n_groups,
        conv_kernel=hf.mamba_d_conv,
        chunk_size=hf.mamba_chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    layer = LayerSpec(attention=True, linear="mamba2", ffn="mlp")
    return {"layers": (layer,) * hf.num_hidden_layers, "linear": {"mamba2": mamba}, "attention": _attention(hf)}


def _falcon_mamba(hf: Any) -> FamilyFields:
    mamba = Mamba1Config(hf.intermediate_size, hf.state_size, hf.conv_kernel, int(hf.time_step_rank))
    layers = (LayerSpec(attention=False, linear="mamba1", ffn=None),) * hf.num_hidden_layers
    return {"layers": layers, "linear": {"mamba1": mamba}, "attention": AttentionConfig(0, 0, 0, rope=None)}


def _jamba(hf: Any) -> FamilyFields:
    mamba = Mamba1Config(
        intermediate_size=hf.mamba_expand * hf.hidden_size,
        state_size=hf.mamba_d_state,
        conv_kernel=hf.mamba_d_conv,
        dt_rank=int(hf.mamba_dt_rank),
    )

    def layer(kind: str, experts: int) -> LayerSpec:
        full = kind == "attention"
        return LayerSpec(full, None if full else "mamba1", "moe" if experts > 1 else "mlp")

    layers = tuple(map(layer, hf.layers_block_type, hf.layers_num_experts))
    # Jamba rotates nothing: its attention layers take positions from the recurrent layers around them.
    return {"layers": layers, "linear": {"mamba1": mamba}, "attention": _attention(hf, rotary=False)}


def _nemotron_h(hf: Any) -> FamilyFields:
    kinds = {
        "linear_attention": LayerSpec(False, "mamba2", None),
        "full_attention": LayerSpec(True, None, None),
        "mlp": LayerSpec(False, None, "mlp"),
        "moe": LayerSpec(False, None, "moe"),
    }
    # Older spellings of the pattern that transformers versions keep in layers_block_type.
    kinds |= {"mamba": kinds["linear_attention"], "attention": kinds["full_attention"]}
    unknown = sorted(set(hf.layers_block_type) - set(kinds))
    if unknown:
        raise ConfigError(f"layers_block_type holds {unknown}; known kinds are {sorted(kinds)}")
    mamba = Mamba2Config(
        num_heads=hf.mamba_num_heads,
        head_dim=hf.mamba_head_dim,
        state_size=hf.ssm_state_size,
        n_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel,
        chunk_size=hf.chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    layers = tuple(kinds[k] for k in hf.layers_block_type)
    head = tuple(kinds[k] for k in hf.mtp_layers_block_type) if hf.num_nextn_predict_layers == 1 else ()
    # Nemotron-H rotates nothing: its attention layers take positions from the recurrent layers around them.
    attention = _attention(hf, rotary=False)
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": attention, "mtp_layers": head}


def _qwen3_next(hf: Any) -> FamilyFields:
    gdn = GDNConfig(
        num_k_heads=hf.linear_num_key_heads,
        num_v_heads=hf.linear_num_value_heads,
        head_k_dim=hf.linear_key_head_dim,
        head_v_dim=hf.linear_value_head_dim,
        conv_kernel=hf.linear_conv_kernel_dim,
    )

    def layer(i: int, kind: str) -> LayerSpec:
        full = kind == "full_attention"
        sparse = hf.num_experts > 0 and i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0
        return LayerSpec(full, None if full else "gdn", "moe" if sparse else "mlp")

    layers = tuple(layer(i, kind) for i, kind in enumerate(hf.layer_types))
    # Published configs leave the number out, and one head is in their checkpoints.
    one_head = getattr(hf, "num_nextn_predict_layers", 1) == 1
    head = (LayerSpec(True, None, "moe" if hf.num_experts > 0 else "mlp"),) if one_head else ()
    return {"layers": layers, "linear": {"gdn": gdn}, "attention": _attention(hf), "mtp_layers": head}


# Families of our own, of which transformers knows nothing: "module:class" with `from_json` and `family_fields`.
OWN_FAMILIES = {"SwaSsmForCausalLM": "hybridrt.models.swa_ssm_config:SwaSsmConfig"}
FAMILIES: dict[str, Callable[[Any], FamilyFields]] = {
    "FalconH1ForCausalLM": _falcon_h1,
    "FalconMambaForCausalLM": _falcon_mamba,
    "JambaForCausalLM": _jamba,
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen3NextForCausalLM": _qwen3_next,
}


# The classes of transformers that read the other families' fields.
CLASSES = {
    "FalconH1ForCausalLM": "FalconH1Config",
    "FalconMambaForCausalLM": "FalconMambaConfig",
    "JambaForCausalLM": "JambaConfig",
    "NemotronHForCausalLM": "NemotronHConfig",
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
}


def _attention(hf: Any, rotary: bool = True) -> AttentionConfig:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {hf.num_attention_heads} is no multiple of num_key_value_heads "
            f"{hf.num_key_value_heads}"
        )
    rope = dict(hf.rope_parameters) if rotary else None
    return AttentionConfig(hf.num_attention_heads, hf.num_key_value_heads, head_dim, rope)


def _check_rope(attention: AttentionConfig, file: Path) -> None:
    parameters = attention.rope or {}
    required = {"rope_theta", *parameters} if attention.rope is not None else set()
    for name in required & set(ROPE):
        value = parameters.get(name)
        if not ROPE[name].holds(value):
            raise ConfigError(f"{file}: rope_parameters: {name} is {shown(value)}; it must be {ROPE[name].text}")
    rotated = int(attention.head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    if required and (rotated < 2 or rotated % 2):
        raise ConfigError(
            f"{file}: rotary embeddings would turn {rotated} of {attention.head_dim} numbers of a head; they turn pairs"
        )


def _check_sizes(fields: FamilyFields, file: Path) -> None:
    """Products of sizes that are fine by themselves."""
    attention: AttentionConfig = fields["attention"]
    widths = {"attention heads x head_dim": attention.num_heads * attention.head_dim}
    for linear in fields["linear"].values():
        if isinstance(linear, Mamba2Config):
            widths |= {"Mamba-2 heads x head_dim": linear.intermediate_size}
            widths |= {"Mamba-2 groups x states": linear.n_groups * linear.state_size}
        if isinstance(linear, GDNConfig):
            widths |= {"GDN key heads x head_dim": linear.num_k_heads * linear.head_k_dim}
            widths |= {"GDN value heads x head_dim": linear.num_v_heads * linear.head_v_dim}
    attends = any(layer.attention for layer in fields["layers"])
    for what, width in widths.items():
        low = 0 if what.startswith("attention") and not attends else 1
        if not low <= width <= MAX_WIDTH:
            raise ConfigError(f"{file}: {what} is {width}; it must be from {low} to {MAX_WIDTH}")
    if not 1 <= len(fields["layers"]) <= MAX_LAYERS:
        raise ConfigError(f"{file} describes {len(fields['layers'])} layers; there must be 1 to {MAX_LAYERS}")


def _check_activation(hf: Any, path: Path) -> None:
    for name in ("hidden_act", "mamba_hidden_act"):
        if getattr(hf, name, "silu") != "silu":
            raise ConfigError(f"{path}: {name} is {getattr(hf, name)!r}; hybridrt implements 'silu'")
    if getattr(hf, "mlp_hidden_act", "relu2") != "relu2":
        raise ConfigError(f"{path}: mlp_hidden_act is {hf.mlp_hidden_act!r}; hybridrt implements 'relu2'")


def _check_experts(hf: Any, path: Path) -> None:
    experts = getattr(hf, "num_experts", 0) or getattr(hf, "n_routed_experts", 0)
    if not 1 <= hf.num_experts_per_tok <= experts:
        raise ConfigError(f"{path}: num_experts_per_tok is {hf.num_experts_per_tok}, but there are {experts} experts")
    groups, chosen = getattr(hf, "n_group", 1), getattr(hf, "topk_group", 1)
    if experts % groups or chosen > groups:
        raise ConfigError(f"{path}: n_group is {groups} and topk_group {chosen}; n_group divides the {experts} experts")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; pass a checkpoint directory or a hub name such as org/model")
    if not file.exists():
        raise ConfigError(f"{path} has no config.json; is it a Hugging Face checkpoint directory?")
    return read_object(file)


def _architecture(path: Path, raw: Mapping[str, Any]) -> str:
    """The first architecture that the file names."""
    architecture: str = (raw.get("architectures") or [""])[0]
    known = sorted({*FAMILIES, *OWN_FAMILIES})
    if architecture in known:
        return architecture
    text = f"{path}: architecture {architecture!r} is not supported; supported are {', '.join(known)}"
    if raw.get("auto_map"):
        text += (
            ". Its config.json asks for trust_remote_code=True: auto_map names Python code of the checkpoint, and "
            "hybridrt never runs such code"
        )
    raise UnsupportedModelError(text)


def _transformers_config(path: Path, raw: dict[str, Any]) -> Any:
    """The family's own class over the fields that were read, so that no other file and no auto_map is looked at."""
    import transformers

    cls = getattr(transformers, CLASSES[raw["architectures"][0]])
    if raw.get("model_type", cls.model_type) != cls.model_type:
        raise ConfigError(
            f"{path}/config.json: model_type is {shown(raw['model_type'])}, but {raw['architectures'][0]} goes with "
            f"{cls.model_type!r}"
        )
    try:
        return cls.from_dict(raw)
    except Exception as e:  # transformers raises many kinds here; all mean that config.json cannot be used
        raise ConfigError(f"{path}/config.json: transformers cannot read it: {e}") from e


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(f"config.json says dtype {name!r}; hybridrt runs {', '.join(DTYPES)}")
    return DTYPES[name]


def _eos_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins over config.json: chat models list their end-of-turn ids there."""
    file = path / "generation_config.json"
    generation = read_object(file) if file.exists() else {}
    check_fields(generation, EOS, file)
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
