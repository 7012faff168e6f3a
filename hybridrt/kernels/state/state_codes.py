"""Recurrent states as codes: of 8 bits with scales, or floats that are rounded stochastically.

A head's state [P, N] has P * N codes, int8 or e4m3, and a scale for each `SCALED` codes of a row. A
number is code * scale. A scale is the block's largest number over the largest code, rounded up to the
upper half of a float32. Codes in float16 and bfloat16 have no scales.

Where decays are slow, a state gains less than one step of its codes from fold to fold. Rounding to
nearest would lose all of it. So x / scale becomes floor(x / scale + u), with u in [0, 1) from a hash
of layer, global head, element and stretch of 256 tokens, plus the number of tokens times a constant.
Nothing else changes u: not the slot, the row, the batch or the number of ranks.

The constant turns u by the golden ratio in 16 tokens (a Kronecker sequence; Niederreiter 1992,
chapter 3). So an element's roundings within a stretch nearly cancel each other, as with error
feedback, and need no memory. Stretches are independent: otherwise u and a state that changes very
slowly could go in step.
"""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import StateSlots
from hybridrt.kernels.core.slots import read_rows, write_rows

SCALED = 32  # neighbouring codes of a row that share a scale
TURN = 0x09E3779B  # what a token adds to a phase of 32 bits: the golden ratio of 2^32 in 16 tokens
STRETCH = 256  # tokens for which phases begin at one hash
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}  # codes
# Bits of the mantissa, and the exponent below which steps are equal.
STEPS = {torch.float8_e4m3fn: (3, -6), torch.float16: (10, -14), torch.bfloat16: (7, -100)}
_WORD, _ODD = 0xFFFFFFFF, 0x9E3779B9


def head_bytes(rows: int, columns: int) -> int:
    """Bytes of the state [rows, columns] of a head in 8 bits, a multiple of 16."""
    return -(-rows * (columns + 2 * num_scales(columns)) // 16) * 16


def num_scales(columns: int) -> int:
    """Scales of a row."""
    return -(-columns // SCALED)


def split_heads_of_codes(stored: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views of stored states [..., H, head_bytes] uint8: codes [..., H, P, N], and scales [..., H,
    P, n] int16."""
    codes, scales = stored.split_with_sizes(_sections(stored.shape[-1], rows, columns), -1)[:2]
    return codes.view(dtype).unflatten(-1, (rows, columns)), scales.view(torch.int16).unflatten(-1, (rows, -1))


def _sections(nbytes: int, rows: int, columns: int) -> tuple[int, int, int]:
    codes, scales = rows * columns, 2 * rows * num_scales(columns)
    codes += codes % 2
    return codes, scales, nbytes - codes - scales


def element_keys(layer_id: int, first_head: int, heads: int) -> Tensor:
    """[heads] int32, from which the rounding of a layer's elements begins. `first_head`: of this
    rank."""
    heads_of_layer = layer_id * 0x10001 + torch.arange(first_head, first_head + heads)
    return _mixed(heads_of_layer).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits, in int64: the mixer of splitmix32."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def rounding_offsets(keys: Tensor, lengths: Tensor, rows: int, columns: int) -> Tensor:
    """u in [0, 1) of the states after `lengths` [n] tokens, for heads with `keys` [H]: [n, H, P, N]
    float32."""
    element = torch.arange(rows * columns, device=keys.device).view(rows, columns)
    tokens = lengths.long().view(-1, 1, 1, 1)
    base = _mixed(keys.long()[:, None, None] + tokens // STRETCH * _ODD + element)
    return ((base + tokens * TURN & _WORD) >> 8).float() * 2.0**-24


def encode(states: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Codes of float32 states [..., P, N] in `dtype`, and their scales [..., P, n] int16 if that
    has 8 bits."""
    if dtype not in LARGEST:
        return _round_floats(states, offsets, *STEPS[dtype]).to(dtype), None
    columns = states.shape[-1]
    largest = torch.nn.functional.pad(states, (0, -columns % SCALED)).unflatten(-1, (-1, SCALED)).abs().amax(-1)
    scales = _rounded_up(largest / LARGEST[dtype])
    scaled = states * _spread(torch.where(scales > 0, 1.0 / scales, 0.0), columns)
    if dtype == torch.int8:
        codes = (scaled + offsets).floor_()
    else:
        codes = _round_floats(scaled, offsets, *STEPS[dtype])
    # A block that is not finite has a scale of NaN, and any codes.
    codes = codes.clamp_(-LARGEST[dtype], LARGEST[dtype]).nan_to_num_(1.0)
    return codes.to(dtype), (scales.view(torch.int32) >> 16).to(torch.int16)


def _rounded_up(scales: Tensor) -> Tensor:
    """float32 scales, rounded up to 16 bits: zeros in the lower half. NaN if not finite."""
    up = ((scales.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(scales.isfinite(), up, torch.nan)


def _round_floats(x: Tensor, offsets: Tensor, mantissa: int, smallest: int) -> Tensor:
    """floor(x / step + offset) * step, with the step of a float of such a mantissa."""
    exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp_(min=127 + smallest)
    step, inverse = (
        (power << 23).view(torch.float32) for power in (exponent - mantissa, 254 - exponent + mantissa)
    )  # 2^(exponent - 127) and its inverse, exactly
    return torch.where(x.isfinite(), (x * inverse + offsets).floor_() * step, x)


def decode(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Float32 states of codes [..., P, N] and scales [..., P, n] int16."""
    if scales is None:
        return codes.float()
    return codes.float() * _spread((scales.int() << 16).view(torch.float32), codes.shape[-1])


def _spread(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(SCALED, -1)[..., :columns]


def read_states(state: StateSlots) -> Tensor:
    """[B, *state] float32 of the slots that are read; padding rows get the scratch slot's."""
    slots, scales = state.read_state_slots, None if state.codes is None else state.codes.state_scales
    return decode(read_rows(state.states, slots), None if scales is None else read_rows(scales, slots))


@operation(By("triton"))
def load_states(state: StateSlots, has_initial_state: Tensor) -> Tensor:
    """[1 + B, H, P, N] float32: a pool of its own, with row b's state in slot 1 + b. Zeros where
    `has_initial_state` [B] is False, in padding rows, and in the scratch slot."""
    real = has_initial_state & (state.read_state_slots >= 0)
    found = read_states(state).masked_fill_(~real.view(-1, 1, 1, 1), 0.0)
    return torch.cat((found.new_zeros(1, *found.shape[1:]), found))


@operation(By("triton"))
def store_states(state: StateSlots, new: Tensor, lengths: Tensor) -> None:
    """Rounds states and stores them in the slots that are written, and how many tokens they include.

    Args:
        state: with codes.
        new: [B, H, P, N] float32.
        lengths: [B] int32 tokens.
    """
    assert state.codes is not None
    slots, codes = state.write_state_slots, state.codes
    offsets = rounding_offsets(codes.element_keys, lengths, *new.shape[2:])
    stored, scales = encode(new.float(), offsets, state.states.dtype)
    write_rows(_as_bytes(state.states), slots, _as_bytes(stored))
    if scales is not None:
        assert codes.state_scales is not None
        write_rows(codes.state_scales, slots, scales)
    write_rows(codes.state_lengths, slots, lengths)


def copy_states(state: StateSlots, lengths: Tensor) -> None:
    """Copies codes and scales from the slots that are read to those that are written, with `lengths` [B] int32
    tokens."""
    assert state.codes is not None
    read, write, codes = state.read_state_slots, state.write_state_slots, state.codes
    for stored in (_as_bytes(state.states), codes.state_scales):
        if stored is not None:
            write_rows(stored, write, read_rows(stored, read))
    write_rows(codes.state_lengths, write, lengths)


def _as_bytes(codes: Tensor) -> Tensor:
    """index_copy_ does not know 8-bit floats on a CPU."""
    return codes.view(torch.int8) if codes.element_size() == 1 else codes
