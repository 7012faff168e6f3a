"""The cosine and sine table of rotary embeddings, scaled by transformers' formulas."""

import math
from typing import Any

import torch

from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.model_config import AttentionConfig, ModelConfig


def rotary_table(config: ModelConfig, attention: AttentionConfig, max_len: int, device: torch.device) -> torch.Tensor:
    """[max_len, rot] float32: rot/2 cosines, then rot/2 sines (Su et al. 2021, eq. 34).

    `rot` is rotary_dim x partial_rotary_factor, rounded up to an even number; with the type
    "proportional", rotary_dim. Frequencies of other types than these and "default" are those of
    transformers.modeling_rope_utils. A "meta" device computes nothing.

    Raises:
        ConfigError: the model's rope_parameters give no frequencies, or max_len is beyond what they
            serve.
    """
    _check_longrope(attention, max_len)
    inv_freq, scaling = _frequencies(config, attention)
    if not inv_freq.isfinite().all() or not math.isfinite(scaling):
        raise ConfigError(f"rope_parameters {shown(dict(attention.rope or {}))} give infinite frequencies")
    if torch.empty(0, dtype=torch.float32, device=device).is_meta:  # a pretended GPU (pretend_gpu.py)
        return torch.empty(max_len, 2 * len(inv_freq), dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(scaling).to(device)


def _check_longrope(attention: AttentionConfig, max_len: int) -> None:
    """Refuses lengths beyond pretraining: longrope changes all frequencies there."""
    rope: Any = attention.rope
    short = rope.get("original_max_position_embeddings") or max_len
    if rope.get("rope_type") == "longrope" and max_len > short:
        raise ConfigError(f"max_model_len is {max_len}; with this model's longrope it can be at most {short}")


def _frequencies(config: ModelConfig, attention: AttentionConfig) -> tuple[torch.Tensor, float]:
    rope: Any = attention.rope
    kind, size, part = rope.get("rope_type", "default"), attention.rotary_dim, rope.get("partial_rotary_factor") or 1.0
    if kind == "proportional":
        return _proportional_frequencies(rope["rope_theta"], size, int(part * size // 2), rope.get("factor")), 1.0
    if kind != "default":
        return _scaled_frequencies(config, attention, rope)
    rot = int(size * part)
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, rot, 2, dtype=torch.float32) / rot), 1.0


def _proportional_frequencies(theta: float, size: int, pairs: int, factor: float | None) -> torch.Tensor:
    """The first `pairs` of all pairs turn, as fast as if all did (LFM3)."""
    found = torch.zeros(size // 2, dtype=torch.float32)
    found[:pairs] = 1.0 / theta ** (torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / size)
    return found / (1.0 if factor is None else factor)


def _scaled_frequencies(config: ModelConfig, attention: AttentionConfig, rope: Any) -> tuple[torch.Tensor, float]:
    from transformers import PreTrainedConfig  # slow to import
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = rope["rope_type"]
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"rope_type is {shown(rope_type)}; known are default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    try:
        whole = PreTrainedConfig(
            rope_parameters=dict(rope), head_dim=attention.rotary_dim, hidden_size=config.hidden_size,
            num_attention_heads=attention.num_heads, max_position_embeddings=config.max_position_embeddings,
        )  # fmt: skip
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](whole, torch.device("cpu"))
        return inv_freq, float(scaling)
    except Exception as e:  # the formulas raise anything
        raise ConfigError(f"rope_parameters {shown(rope)} do not serve rope_type {rope_type!r}: {e!r}") from e


def unturned_table(max_len: int, device: torch.device) -> torch.Tensor:
    """[max_len, 2] float32: a table that rotates nothing, for heads with norms and no positions."""
    return torch.tensor([1.0, 0.0], device=device).repeat(max_len, 1)
