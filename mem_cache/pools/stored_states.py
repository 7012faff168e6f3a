"""How a pool stores recurrent states: in their shape, or as bytes of codes and scales."""

from collections.abc import Collection, Sequence

import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.records import StateCodes
from hybridrt.kernels.state.state_codes import LARGEST, SCALED, element_keys, head_bytes, split_heads_of_codes
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import linear_kind, state_dtype


def stored_state(shape: StateShape, asked: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Dimensions and dtype of a layer's state in a slot, if the run's states are `asked`. States in 8 bits are
    [heads, bytes] uint8: a head's codes, then its scales."""
    dtype = state_dtype(shape, asked)
    if dtype not in LARGEST or not shape.temporal_numel:
        return shape.temporal, dtype
    heads, rows, columns = shape.temporal
    return (heads, head_bytes(rows, columns)), torch.uint8


def storage_name(dtype: torch.dtype) -> str:
    """What two workers that exchange states must agree on: the dtype, and the scales of 8-bit
    codes."""
    name = str(dtype).removeprefix("torch.")
    return f"{name} with a bfloat16 scale for {SCALED}" if dtype in LARGEST else name


def check_codes(kinds: Collection[str], dtype: torch.dtype, stochastic: bool, mode: str) -> None:
    """ConfigError unless states of these kinds can be stored in `dtype` and rounded so in a state
    mode."""
    if not stochastic:
        return
    what = f'mamba_ssm_dtype="{_option(dtype)}"' if dtype in LARGEST else 'mamba_ssm_rounding="stochastic"'
    instead = 'mamba_ssm_dtype="bfloat16"' if dtype in LARGEST else 'mamba_ssm_rounding="nearest"'
    if without := [kind.title for kind in map(linear_kind, kinds) if not kind.codes and kind.temporal_dims]:
        raise ConfigError(f"{what} does not exist for {', '.join(without)}; use {instead}")
    if mode != "replay":
        raise ConfigError(
            f'{what} needs state mode "replay", which writes a state once in 16 tokens; state mode is "{mode}": set '
            f'state_mode="replay" (with drafts that do not fork), or use {instead}'
        )


def _option(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else "int8"


def states_of_codes(
    stored: torch.Tensor, shape: StateShape, dtype: torch.dtype, layer_ids: Sequence[int], first_head: int,
    state_lengths: torch.Tensor,
) -> tuple[torch.Tensor, StateCodes]:  # fmt: skip
    """Views of stored states [L, S+1, ...]: what kernels read, and its codes with a dimension for
    the layer."""
    heads, rows, columns = shape.temporal
    keys = torch.stack([element_keys(i, first_head, heads) for i in layer_ids]).to(stored.device)
    if dtype not in LARGEST:
        return stored, StateCodes(state_lengths, keys)
    codes, scales = split_heads_of_codes(stored, rows, columns, dtype)
    return codes, StateCodes(state_lengths, keys, scales)
