"""Pools of states in 8 bits, or of states that are rounded stochastically, for tests of kernels."""

import torch
from torch import Tensor

from hybridrt.kernels.core.records import StateCodes
from hybridrt.kernels.state.state_codes import (
    LARGEST,
    decode,
    element_keys,
    encode,
    head_bytes,
    rounding_offsets,
    split_heads_of_codes,
)

DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16]
EIGHT_BITS = DTYPES[:2]


def empty_codes(
    slots: int, heads: int, rows: int, columns: int, dtype: torch.dtype, *, layer_id: int = 3, first_head: int = 0
) -> tuple[Tensor, StateCodes]:
    """States [slots, H, P, N] of zeros as a pool has them, and their codes."""
    codes = StateCodes(torch.zeros(slots, dtype=torch.int32), element_keys(layer_id, first_head, heads))
    if dtype not in LARGEST:
        return torch.zeros(slots, heads, rows, columns, dtype=dtype), codes
    stored = torch.zeros(slots, heads, head_bytes(rows, columns), dtype=torch.uint8)
    states, scales = split_heads_of_codes(stored, rows, columns, dtype)
    return states, codes._replace(state_scales=scales)


def coded(states: Tensor, dtype: torch.dtype, **keys: int) -> tuple[Tensor, StateCodes]:
    """A pool [S+1, H, P, N] that holds float32 `states` to one step of the codes, each after 5 tokens."""
    slots, heads, rows, columns = states.shape
    pool, codes = empty_codes(slots, heads, rows, columns, dtype, **keys)
    codes.state_lengths.fill_(5)
    offsets = rounding_offsets(codes.element_keys, codes.state_lengths, rows, columns)
    stored, scales = encode(states.float(), offsets, dtype)
    pool.copy_(stored)
    if scales is not None:
        assert codes.state_scales is not None
        codes.state_scales.copy_(scales)
    return pool, codes


def numbers(pool: Tensor, codes: StateCodes) -> Tensor:
    """The float32 states of a pool."""
    return decode(pool, codes.state_scales)


def one_layer(codes: StateCodes) -> StateCodes:
    """With a dimension for the layer."""
    scales = None if codes.state_scales is None else codes.state_scales[None]
    return StateCodes(codes.state_lengths, codes.element_keys[None], scales)


def flat_codes(codes: StateCodes) -> dict[str, Tensor]:
    """Arguments of `flat`."""
    return {name: value for name, value in codes._asdict().items() if value is not None}
