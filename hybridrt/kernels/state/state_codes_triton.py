"""Triton kernels of `load_states` and `store_states`, and device functions for codes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_width, next_power_of_2
from hybridrt.kernels.core.records import StateSlots
from hybridrt.kernels.state.state_codes import SCALED, num_scales

_SCALED = tl.constexpr(SCALED)
TILE = 4096  # elements of a program of four warps


@triton.jit
def decode_tile(codes, scales):  # type: ignore[no-untyped-def]
    """Codes [P, N] and the int16 scales [P, n] of their blocks as float32 [P, N]."""
    numbers = (scales.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    blocks = tl.reshape(codes.to(tl.float32), (codes.shape[0], scales.shape[1], codes.shape[1] // scales.shape[1]))
    return tl.reshape(blocks * numbers[:, :, None], (codes.shape[0], codes.shape[1]))


@triton.jit
def load_scales(slot_scales, row, first, rows, columns: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of rows `row` [P] from column `first` on: [P, BLOCK / SCALED] int16, at least one. Those of rows from
    `rows` on are 0. `slot_scales` points at those of a head."""
    count: tl.constexpr = (columns + _SCALED - 1) // _SCALED
    wanted: tl.constexpr = BLOCK // _SCALED if BLOCK > _SCALED else 1
    s = first // _SCALED + tl.arange(0, wanted)
    mask = (row < rows)[:, None] & (s < count)[None, :]
    return tl.load(slot_scales + row[:, None] * count + s[None, :], mask=mask, other=0)


@triton.jit
def load_words(slot_head, slot_scales, row, rows, columns: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `row` [P] of a head's int8 codes, as int32 words [P, BLOCK / 4], and the scale of each 16 codes, int16
    [P, BLOCK / 16]. Those of rows from `rows` on are 0. Four divides `columns`."""
    k, s = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK // 16)
    cells = slot_head.to(tl.pointer_type(tl.int32), bitcast=True) + row[:, None] * (columns // 4) + k[None, :]
    words = tl.load(cells, mask=(row < rows)[:, None] & (k < columns // 4)[None, :], other=0)
    count: tl.constexpr = (columns + _SCALED - 1) // _SCALED
    block = s // (_SCALED // 16)
    mask = (row < rows)[:, None] & (block < count)[None, :]
    return words, tl.load(slot_scales + row[:, None] * count + block[None, :], mask=mask, other=0)


@triton.jit
def multiply_words(words, scales, x):  # type: ignore[no-untyped-def]
    """S x, float32 [P]: of int8 codes S as int32 words [P, N / 4], int16 scales [P, N / 16] of each 16 codes, and
    float32 x [N / 4, 4].

    Integers are multiplied four at a time, which takes a sixth of the instructions that decoded numbers take. x is
    taken in steps of its largest number / 2^21 or smaller. bfloat16 numbers from the largest / 2^14 on are exact so.
    If x is not finite, the result may be any number: a step's scores show it, as they have the same x as a factor.
    """
    high, mid, low, step = _digits(x)
    shape: tl.constexpr = (words.shape[0], words.shape[1] // 4, 4)
    upper = _dot4(words, high[None, :], tl.zeros_like(words), "s32")
    lower = _dot4(words, low[None, :], _dot4(words, mid[None, :], tl.zeros_like(words), "u32") << 8, "u32")
    upper, lower = tl.sum(tl.reshape(upper, shape), axis=2), tl.sum(tl.reshape(lower, shape), axis=2)
    numbers = (scales.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.sum((upper.to(tl.float32) * 65536.0 + lower.to(tl.float32)) * numbers, axis=1) * step


@triton.jit
def _digits(x):  # type: ignore[no-untyped-def]
    """Float32 x [W, 4] as step * (high * 2^16 + mid * 2^8 + low). Digits have a byte each, four in an int32 word [W].
    The high ones have a sign."""
    exponent = tl.minimum(tl.maximum(tl.max(tl.abs(x)).to(tl.int32, bitcast=True) >> 23, 22), 254)
    inverse, step = ((275 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 21) << 23)
    whole = tl.floor(x * inverse + 0.5).to(tl.int32)
    place = (8 * tl.arange(0, 4))[None, :]
    high, mid = tl.sum(((whole >> 16) & 0xFF) << place, axis=1), tl.sum(((whole >> 8) & 0xFF) << place, axis=1)
    low = tl.sum((whole & 0xFF) << place, axis=1)
    return high, mid, low, step.to(tl.float32, bitcast=True)


@triton.jit
def _dot4(a, b, c, B_TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """c + the sum of four products of bytes of the int32 words a, with signs, and b, with signs if its type is s32."""
    return tl.inline_asm_elementwise(
        "dp4a.s32." + B_TYPE + " $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def rounding_offsets(key, element, length):  # type: ignore[no-untyped-def]
    """u in [0, 1) as in `state_codes.rounding_offsets`. key, length: int32 of one head and one row."""
    x = (key.to(tl.uint32, bitcast=True) + length.to(tl.uint32) // 256 * 0x9E3779B9) + element.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = (x ^ (x >> 15)) + length.to(tl.uint32) * 0x09E3779B
    return (x >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def encode_tile(x, offsets, scales_shape: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of float32 [P, N] in `dtype`, and their int16 scales [P, scales_shape]."""
    LARGEST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    blocks = tl.reshape(x, (x.shape[0], scales_shape, x.shape[1] // scales_shape))
    largest, finite = tl.max(tl.abs(blocks), axis=2), tl.sum(blocks - blocks, axis=2) == 0.0
    up = ((largest / LARGEST).to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    scales = up.to(tl.float32, bitcast=True)
    inverse = tl.where(scales > 0.0, 1.0 / tl.where(scales > 0.0, scales, 1.0), 0.0)
    scaled = tl.reshape(blocks * inverse[:, :, None], (x.shape[0], x.shape[1]))
    codes = tl.floor(scaled + offsets) if dtype == tl.int8 else round_floats(scaled, offsets, 3, -6)
    codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
    return codes.to(dtype), tl.where(finite, up >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def word_numbers(words, scales, J: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of int8 codes in int32 words, those of byte J, times `scales`."""
    # 2^23 + a byte from 0 to 255: conversions take more instructions.
    bits = (((words >> (8 * J)) & 0xFF) ^ 0x80) | 0x4B000000
    return (bits.to(tl.float32, bitcast=True) - 8388736.0) * scales


@triton.jit
def spread_over_words(x, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of each block [P, n] for each of its words: [P, n * words]."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], words])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * words])


@triton.jit
def encode_words(x0, x1, x2, x3, key, element, length, blocks: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `encode_tile` of int8, of float32 numbers [P, W] of four neighbouring columns: words [P, W] and scales [P,
    blocks]. `element` [P, W] is that of x0; key and length as in `rounding_offsets`."""
    run: tl.constexpr = x0.shape[1] // blocks
    # Bits of sizes, in the order of the sizes. Those of NaN are the largest.
    largest = tl.maximum(tl.maximum(_size(x0), _size(x1)), tl.maximum(_size(x2), _size(x3)))
    largest = tl.max(tl.reshape(largest, [x0.shape[0], blocks, run]), axis=2)
    up = ((largest.to(tl.float32, bitcast=True) / 127.0).to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    scales = up.to(tl.float32, bitcast=True)
    inverse = tl.where(scales > 0.0, 1.0 / tl.where(scales > 0.0, scales, 1.0), 0.0)
    inverse = spread_over_words(inverse, run)
    words = _byte(x0 * inverse, rounding_offsets(key, element, length))
    words |= _byte(x1 * inverse, rounding_offsets(key, element + 1, length)) << 8
    words |= _byte(x2 * inverse, rounding_offsets(key, element + 2, length)) << 16
    words |= _byte(x3 * inverse, rounding_offsets(key, element + 3, length)) << 24
    return words, tl.where(largest < 0x7F800000, up >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def _size(x):  # type: ignore[no-untyped-def]
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _byte(scaled, offsets):  # type: ignore[no-untyped-def]
    """floor(scaled + offsets), from -127 to 127, as a byte. In float32 numbers from 2^23 on the last bit is 1."""
    moved = scaled + (offsets - 0.5) + 12582912.0
    moved = tl.minimum(tl.maximum(moved, 12582785.0), 12583039.0)
    return moved.to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def round_floats(x, offsets, mantissa: tl.constexpr, smallest: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `state_codes._round_floats`."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 + smallest)
    step = ((exponent - mantissa) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent + mantissa) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent < 255, tl.floor(x * inverse + offsets) * step, x)


@triton.jit
def round_to(x, offsets, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x in float16 or bfloat16, rounded stochastically."""
    if dtype == tl.bfloat16:
        rounded = round_floats(x, offsets, 7, -100)
    else:
        rounded = round_floats(x, offsets, 10, -14)
    return rounded.to(dtype)


@jit_kernel
def _load_kernel(  # type: ignore[no-untyped-def]
    states_ptr, scales_ptr, slots_ptr, has_initial_ptr, out_ptr,
    states_ss: tl.constexpr, states_sh: tl.constexpr, scales_ss: tl.constexpr, scales_sh: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, NS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid [1 + rows, heads, tiles of P]: the scratch slot, then the rows."""
    place, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    p, n, s = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    b = tl.maximum(place - 1, 0)
    slot = tl.where(place > 0, tl.load(slots_ptr + b), -1).to(tl.int64)
    rows = tl.where((slot >= 0) & tl.load(has_initial_ptr + b), P, 0)  # without a state, none are read
    mask = (p < P)[:, None] & (n < N)[None, :]
    tile = p[:, None] * N + n[None, :]
    read = tl.load(
        states_ptr + tl.maximum(slot, 0) * states_ss + h * states_sh + tile, mask=mask & (p < rows)[:, None], other=0.0
    )
    if scales_ptr is None:
        state = read.to(tl.float32)
    else:
        cells = scales_ptr + tl.maximum(slot, 0) * scales_ss + h * scales_sh + p[:, None] * NS + s[None, :]
        state = decode_tile(read, tl.load(cells, mask=(p < rows)[:, None] & (s < NS)[None, :], other=0))
    tl.store(out_ptr + (place * tl.num_programs(1) + h) * (P * N) + tile, state, mask=mask)


@jit_kernel
def _store_kernel(  # type: ignore[no-untyped-def]
    new_ptr, states_ptr, scales_ptr, slots_ptr, lengths_ptr, state_lengths_ptr, keys_ptr,
    states_ss: tl.constexpr, states_sh: tl.constexpr, scales_ss: tl.constexpr, scales_sh: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, NS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid [rows, heads, tiles of P]."""
    b, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    p, n, s = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    slot, length = tl.load(slots_ptr + b).to(tl.int64), tl.load(lengths_ptr + b)
    if slot >= 0:
        mask = (p < P)[:, None] & (n < N)[None, :]
        tile = p[:, None] * N + n[None, :]
        new = tl.load(new_ptr + (b * tl.num_programs(1) + h) * (P * N) + tile, mask=mask, other=0.0)
        offsets = rounding_offsets(tl.load(keys_ptr + h), tile, length)
        cells = states_ptr + slot * states_ss + h * states_sh + tile
        if scales_ptr is None:
            tl.store(cells, round_to(new, offsets, states_ptr.dtype.element_ty), mask=mask)
        else:
            codes, scales = encode_tile(new, offsets, BLOCK_S, states_ptr.dtype.element_ty)
            tl.store(cells, codes, mask=mask)
            scales_cells = scales_ptr + slot * scales_ss + h * scales_sh + p[:, None] * NS + s[None, :]
            tl.store(scales_cells, scales, mask=(p < P)[:, None] & (s < NS)[None, :])
        tl.store(state_lengths_ptr + slot, length)


def code_blocks(columns: int) -> dict[str, int]:
    """Blocks of a tile with all columns: BLOCK_N of them, and BLOCK_S scales of a row."""
    block_n = dot_width(columns)
    return {"BLOCK_N": block_n, "BLOCK_S": max(1, block_n // SCALED)}


def state_scales(state: StateSlots) -> Tensor | None:
    """Scales of the codes, if the states have 8 bits."""
    return None if state.codes is None else state.codes.state_scales


def scale_strides(scales: Tensor | None) -> tuple[int, int]:
    """Strides of a slot and a head in the scales of one layer; zeros for None."""
    return (0, 0) if scales is None else (scales.stride(-4), scales.stride(-3))


def _tile(states: Tensor) -> dict[str, int]:
    _, _, rows, columns = states.shape
    blocks = code_blocks(columns)
    block_p = min(next_power_of_2(rows), max(1, TILE // blocks["BLOCK_N"]))
    return blocks | {"BLOCK_P": block_p, "P": rows, "N": columns, "NS": num_scales(columns)}


def load_states_triton(state: StateSlots, has_initial_state: Tensor) -> Tensor:
    """`load_states` in one launch."""
    states, slots = state.states, state.read_state_slots
    scales = state_scales(state)
    tile, heads = _tile(states), states.shape[1]
    out = torch.empty((1 + len(slots), *states.shape[1:]), dtype=torch.float32, device=states.device)
    _load_kernel[1 + len(slots), heads, cdiv(tile["P"], tile["BLOCK_P"])](
        states, scales, slots, has_initial_state, out, states.stride(0), states.stride(1), *scale_strides(scales),
        num_warps=4, **tile,
    )  # fmt: skip
    return out


def store_states_triton(state: StateSlots, new: Tensor, lengths: Tensor) -> None:
    """`store_states` in one launch."""
    states, slots, codes = state.states, state.write_state_slots, state.codes
    assert codes is not None
    tile, scales = _tile(states), codes.state_scales
    _store_kernel[len(slots), states.shape[1], cdiv(tile["P"], tile["BLOCK_P"])](
        new, states, scales, slots, lengths, codes.state_lengths, codes.element_keys,
        states.stride(0), states.stride(1), *scale_strides(scales), num_warps=4, **tile,
    )  # fmt: skip
