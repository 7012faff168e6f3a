"""Triton kernels of `advance_ring` and `fold_ring`: one launch each for all layers.

Few rows fold in a step, and only the device knows which. The first launch lists them. The second has
as many programs as the device holds, which take tiles of states from that list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.core.decay_sums_triton import finite_rate
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_width
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import StateCodes
from hybridrt.kernels.state.state_codes import num_scales
from hybridrt.kernels.state.state_codes_triton import (
    TILE,
    code_blocks,
    decode_tile,
    encode_tile,
    encode_words,
    round_to,
    rounding_offsets,
    scale_strides,
    spread_over_words,
    word_numbers,
)
from hybridrt.kernels.state.state_ring import RingFolds

PROGRAMS_PER_MULTIPROCESSOR, WORDS_PER_MULTIPROCESSOR = 6, 4  # of tiles, and of states of int8 codes


@jit_kernel(do_not_specialize=["batch"])
def _advance_kernel(  # type: ignore[no-untyped-def]
    start_ptr, length_ptr, rows_ptr, accepted_ptr, slots_ptr, state_lengths_ptr,
    fold_slots_ptr, fold_rows_ptr, fold_start_ptr, fold_length_ptr, fold_ends_ptr, count_ptr, batch,
    W: tl.constexpr, WIDEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    count = 0
    for first in range(0, batch, BLOCK):
        b = first + tl.arange(0, BLOCK)
        accepted = tl.load(accepted_ptr + b, mask=b < batch, other=0)
        live = accepted > 0
        row = tl.load(rows_ptr + b, mask=live, other=0)
        start = tl.load(start_ptr + row, mask=live, other=0)
        entries = tl.load(length_ptr + row, mask=live, other=0) + accepted
        full = live & (start + entries + WIDEST > W)
        tl.store(start_ptr + row, tl.where(full, 0, start), mask=live)
        tl.store(length_ptr + row, tl.where(full, 0, entries), mask=live)
        place = count + tl.cumsum(full.to(tl.int32)) - 1
        slots = tl.load(slots_ptr + b, mask=full, other=-1)
        tl.store(fold_slots_ptr + place, slots, mask=full)
        tl.store(fold_rows_ptr + place, row, mask=full)
        tl.store(fold_start_ptr + place, start, mask=full)
        tl.store(fold_length_ptr + place, entries, mask=full)
        if state_lengths_ptr is not None:
            ends = tl.load(state_lengths_ptr + slots, mask=full, other=0) + entries
            tl.store(state_lengths_ptr + slots, ends, mask=full)
            tl.store(fold_ends_ptr + place, ends, mask=full)
        count += tl.sum(full.to(tl.int32))
    tl.store(count_ptr, count)


@jit_kernel
def _fold_kernel(  # type: ignore[no-untyped-def]
    A_ptr, states_ptr, scales_ptr, values_ptr, keys_ptr, gates_ptr,
    read_slots_ptr, write_slots_ptr, rows_ptr, start_ptr, length_ptr, ends_ptr, count_ptr,
    state_lengths_ptr, element_keys_ptr,
    states_sl, scales_sl, values_sl, keys_sl, gates_sl,
    states_ss: tl.constexpr, states_sh: tl.constexpr, scales_ss: tl.constexpr, scales_sh: tl.constexpr,
    values_sr: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NS: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
    CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    P_PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    N_PARTS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = H * P_PARTS * N_PARTS
    w = tl.arange(0, BLOCK_W)
    for item in range(tl.program_id(0), tl.load(count_ptr) * (L * TILES), tl.num_programs(0)):
        layer = tl.full([], item // TILES % L, tl.int64)
        index, tile = item // (L * TILES), item % TILES
        h = tile // (P_PARTS * N_PARTS)
        p = tile // N_PARTS % P_PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tile % N_PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
        p_mask, n_mask = p < P, n < N
        read = tl.load(read_slots_ptr + index).to(tl.int64)
        write = tl.load(write_slots_ptr + index).to(tl.int64)
        live = (read >= 0) & (write >= 0)
        if scales_ptr is not None:
            empty = tl.load(length_ptr + index) == 0
            if live & empty:
                states_head = states_ptr + layer * states_sl + h * states_sh
                copy_tile(states_head + read * states_ss, states_head + write * states_ss, p, n, P, N)
                s = tl.arange(0, BLOCK_S)
                scales_head = scales_ptr + layer * scales_sl + h * scales_sh
                copy_tile(scales_head + read * scales_ss, scales_head + write * scales_ss, p, s, P, NS)
                tl.store(state_lengths_ptr + write, tl.load(ends_ptr + index))
                live = False
        if live:
            row = tl.load(rows_ptr + index).to(tl.int64)
            past = w < tl.load(length_ptr + index)
            column = (tl.load(start_ptr + index) + w) % W
            mask = p_mask[:, None] & n_mask[None, :]
            cells = states_ptr + layer * states_sl + h * states_sh + p[:, None] * N + n[None, :]
            state = tl.load(cells + read * states_ss, mask=mask, other=0.0)
            if scales_ptr is not None:
                s = tl.arange(0, BLOCK_S)
                s_mask = p_mask[:, None] & (s < NS)[None, :]
                scales_cells = scales_ptr + layer * scales_sl + h * scales_sh + p[:, None] * NS + s[None, :]
                state = decode_tile(state, tl.load(scales_cells + read * scales_ss, mask=s_mask, other=0))
            gates_row = gates_ptr + layer * gates_sl + row * gates_sr
            if not CHANNELS:
                length = tl.load(length_ptr + index)
                later_column = (tl.load(start_ptr + index) + w + 1) % W
                gates = tl.load(gates_row + h * W + column, mask=past, other=0.0)
                later = tl.load(gates_row + h * W + later_column, mask=w + 1 < length, other=0.0)
            values_row = values_ptr + layer * values_sl + row * values_sr + h * (W * P)
            values_cells = values_row + column[:, None] * P + p[None, :]
            values = tl.load(values_cells, mask=past[:, None] & p_mask[None, :], other=0.0)
            keys_row = keys_ptr + layer * keys_sl + row * keys_sr + h // (H // G) * (W * N)
            keys = tl.load(keys_row + column[:, None] * N + n[None, :], mask=past[:, None] & n_mask[None, :], other=0.0)
            if CHANNELS:
                start, length = tl.load(start_ptr + index), tl.load(length_ptr + index)
                left, total = decays_of_channels(gates_row + h * (W * N), start, length, w, n, N, W)
                history = exact_dot(tl.trans(values.to(tl.float32)), keys.to(tl.float32) * tl.exp(left))
                folded = state.to(tl.float32) * tl.exp(total)[None, :] + history
            else:
                # Sums from the end, as in decays_of_channels.
                weight, log_decay = 1.0, gates
                if A_ptr is not None:
                    A = finite_rate(tl.load(A_ptr + layer * H + h))
                    weight, log_decay, later = gates, gates * A, later * A
                total = tl.sum(log_decay, axis=0)
                weight *= tl.exp(tl.cumsum(later, axis=0, reverse=True))
                history = exact_dot(tl.trans(values.to(tl.float32) * weight[:, None]), keys)
                folded = state.to(tl.float32) * tl.exp(total) + history
            cells += write * states_ss
            if element_keys_ptr is None:
                tl.store(cells, folded.to(states_ptr.dtype.element_ty), mask=mask)
            else:
                end = tl.load(ends_ptr + index)
                key = tl.load(element_keys_ptr + layer * H + h)
                offsets = rounding_offsets(key, p[:, None] * N + n[None, :], end)
                if scales_ptr is None:
                    tl.store(cells, round_to(folded, offsets, states_ptr.dtype.element_ty), mask=mask)
                else:
                    codes, scales = encode_tile(folded, offsets, BLOCK_S, states_ptr.dtype.element_ty)
                    tl.store(cells, codes, mask=mask)
                    tl.store(scales_cells + write * scales_ss, scales, mask=s_mask)
                tl.store(state_lengths_ptr + write, end)


@jit_kernel
def _fold_words_kernel(  # type: ignore[no-untyped-def]
    A_ptr, states_ptr, scales_ptr, values_ptr, keys_ptr, gates_ptr,
    read_slots_ptr, write_slots_ptr, rows_ptr, start_ptr, length_ptr, ends_ptr, count_ptr,
    state_lengths_ptr, element_keys_ptr,
    states_sl, scales_sl, values_sl, keys_sl, gates_sl,
    states_ss: tl.constexpr, states_sh: tl.constexpr, scales_ss: tl.constexpr, scales_sh: tl.constexpr,
    values_sr: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr,
    L: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NS: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_fold_kernel`, of int8 codes, four in an int32 word. A program folds whole heads, BLOCK_P rows at a time."""
    begin(PDL)
    RUN: tl.constexpr = BLOCK_N // 4 // BLOCK_S
    w, k, n, s = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N // 4), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_S)
    for item in range(tl.program_id(0), tl.load(count_ptr) * (L * H), tl.num_programs(0)):
        layer = tl.full([], item // H % L, tl.int64)
        index, h = item // (L * H), item % H
        read = tl.load(read_slots_ptr + index).to(tl.int64)
        write = tl.load(write_slots_ptr + index).to(tl.int64)
        if (read >= 0) & (write >= 0):
            row, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(ends_ptr + index)
            start, length = tl.load(start_ptr + index), tl.load(length_ptr + index)
            past, column = w < length, (start + w) % W
            gates_row = gates_ptr + layer * gates_sl + row * gates_sr + h * W
            gates = tl.load(gates_row + column, mask=past, other=0.0)
            later = tl.load(gates_row + (start + w + 1) % W, mask=w + 1 < length, other=0.0)
            keys_row = keys_ptr + layer * keys_sl + row * keys_sr + h // (H // G) * (W * N)
            keys_cells = keys_row + column[:, None] * N + n[None, :]
            keys = tl.load(keys_cells, mask=past[:, None] & (n < N)[None, :], other=0.0)
            even, odd = tl.split(tl.reshape(keys, [BLOCK_W, BLOCK_N // 4, 2, 2]))
            keys_0, keys_2 = tl.split(even)
            keys_1, keys_3 = tl.split(odd)
            # Sums from the end, as in decays_of_channels.
            weight, log_decay = 1.0, gates
            if A_ptr is not None:
                A = finite_rate(tl.load(A_ptr + layer * H + h))
                weight, log_decay, later = gates, gates * A, later * A
            decay = tl.exp(tl.sum(log_decay, axis=0))
            weight *= tl.exp(tl.cumsum(later, axis=0, reverse=True))
            values_row = values_ptr + layer * values_sl + row * values_sr + h * (W * P)
            states_head = states_ptr + layer * states_sl + h * states_sh
            source = (states_head + read * states_ss).to(tl.pointer_type(tl.int32), bitcast=True)
            target = (states_head + write * states_ss).to(tl.pointer_type(tl.int32), bitcast=True)
            scales_head = scales_ptr + layer * scales_sl + h * scales_sh
            key = tl.load(element_keys_ptr + layer * H + h)
            for first in range(0, P, BLOCK_P):
                p = first + tl.arange(0, BLOCK_P)
                p_mask = p < P
                mask, s_mask = p_mask[:, None] & (k < N // 4)[None, :], p_mask[:, None] & (s < NS)[None, :]
                cells, scales_cells = p[:, None] * (N // 4) + k[None, :], p[:, None] * NS + s[None, :]
                words = tl.load(source + cells, mask=mask, other=0)
                scales = tl.load(scales_head + read * scales_ss + scales_cells, mask=s_mask, other=0)
                values_cells = values_row + column[:, None] * P + p[None, :]
                values = tl.load(values_cells, mask=past[:, None] & p_mask[None, :], other=0.0).to(tl.float32)
                values = tl.trans(values * weight[:, None])
                numbers = (scales.to(tl.int32) << 16).to(tl.float32, bitcast=True) * decay
                numbers = spread_over_words(numbers, RUN)
                x0 = word_numbers(words, numbers, 0) + exact_dot(values, keys_0)
                x1 = word_numbers(words, numbers, 1) + exact_dot(values, keys_1)
                x2 = word_numbers(words, numbers, 2) + exact_dot(values, keys_2)
                x3 = word_numbers(words, numbers, 3) + exact_dot(values, keys_3)
                new, new_scales = encode_words(x0, x1, x2, x3, key, p[:, None] * N + 4 * k[None, :], end, BLOCK_S)
                # Without entries, as they were: rounded again, codes would change.
                tl.store(target + cells, tl.where(length == 0, words, new), mask=mask)
                new_scales = tl.where(length == 0, scales, new_scales)
                tl.store(scales_head + write * scales_ss + scales_cells, new_scales, mask=s_mask)
            tl.store(state_lengths_ptr + write, end)


@triton.jit
def copy_tile(source, target, p, n, P: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies rows `p` and columns `n` of a matrix [P, N]."""
    cells, mask = p[:, None] * N + n[None, :], (p < P)[:, None] & (n < N)[None, :]
    tl.store(target + cells, tl.load(source + cells, mask=mask), mask=mask)


@triton.jit
def decays_of_channels(  # type: ignore[no-untyped-def]
    gates_row, start, length, w, n, N: tl.constexpr, W: tl.constexpr
):
    """Logs of what is left at the end of a head's ring in channels `n`: of each entry [BLOCK_W,
    BLOCK_N] and of the state in the pool [BLOCK_N]. `gates_row` points at the gates [W, N].

    Sums are taken from the end: differences of sums from the start are inexact after strong decays.
    """
    cells = gates_row + ((start + w + 1) % W)[:, None] * N + n[None, :]
    later = tl.load(cells, mask=(w + 1 < length)[:, None] & (n < N)[None, :], other=0.0)
    oldest = tl.load(gates_row + start * N + n, mask=n < tl.where(length > 0, N, 0), other=0.0)
    return tl.cumsum(later, axis=0, reverse=True), tl.sum(later, axis=0) + oldest


@triton.jit
def exact_dot(a, b):  # type: ignore[no-untyped-def]
    """a @ b to float32 accuracy, for float32 a and b in the model's dtype. For a bfloat16 b, a is
    the sum of three bfloat16 parts of 8 bits: cheaper than three TF32 products of converted
    operands.
    """
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        out = tl.dot(low, b, acc=tl.dot(middle, b, acc=tl.dot(high, b)))
    else:
        out = tl.dot(a, b.to(tl.float32), input_precision="tf32x3")
    return out


@triton.jit
def products(a, b, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """a [M, K] b^T [K, T] in float32; b is one row, or at least 16."""
    if b.shape[0] == 1:
        out = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)[:, None]
    else:
        out = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    return out


@triton.jit
def multiply_state(state, vectors, acc):  # type: ignore[no-untyped-def]
    """acc + state [P, N] times vectors [T, N]; element by element, to be summed over N at the end,
    where T is 1."""
    if vectors.shape[0] == 1:
        acc += state.to(tl.float32) * vectors.to(tl.float32)
    elif state.dtype == vectors.dtype and state.dtype != tl.float32:
        acc = tl.dot(state, tl.trans(vectors), acc=acc)
    else:
        acc += exact_dot(state.to(tl.float32), tl.trans(vectors))
    return acc


@triton.jit
def multiply_codes(codes, scales, vectors, acc):  # type: ignore[no-untyped-def]
    """As `multiply_state`, of codes [P, N] with int16 scales [P, n]: one a row, unless T is 1. Codes are exact in any
    dtype of vectors."""
    if vectors.shape[0] == 1:
        acc = multiply_state(decode_tile(codes, scales), vectors, acc)
    else:
        numbers = (scales.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        acc += multiply_state(codes.to(vectors.dtype), vectors, tl.zeros_like(acc)) * numbers
    return acc


def advance_ring_triton(
    start: Tensor, length: Tensor, rows: Tensor, accepted: Tensor, state_slots: Tensor, *, width: int, widest: int,
    state_lengths: Tensor | None = None,
) -> RingFolds:  # fmt: skip
    """Triton `advance_ring`: one launch of one program."""
    batch = len(rows)
    named = torch.empty((4 if state_lengths is None else 5, batch), dtype=torch.int32, device=rows.device)
    ends = None if state_lengths is None else named[4]
    folds = RingFolds(named[0], named[1], named[2], named[3], start.new_empty(1), state_lengths=ends)
    _advance_kernel[(1,)](
        start, length, rows, accepted, state_slots, state_lengths,
        folds.state_slots, folds.rows, folds.start, folds.length, ends, folds.count,
        batch, W=width, WIDEST=widest, BLOCK=128, **pdl(start.device),
    )  # fmt: skip
    return folds


def fold_ring_triton(
    states: Tensor, values: Tensor, keys: Tensor, gates: Tensor, A: Tensor | None, folds: RingFolds,
    codes: StateCodes | None = None,
) -> None:  # fmt: skip
    """Triton `fold_ring`: one launch for all layers."""
    layers, _, heads, dim, state_dim = states.shape
    by_channel, scales = gates.ndim == 5, None if codes is None else codes.state_scales
    lengths, element_keys = (None, None) if codes is None else (codes.state_lengths, codes.element_keys)
    if takes_words(states, by_channel):
        kernel, own, each = _fold_words_kernel, code_blocks(state_dim) | {"BLOCK_P": 16}, WORDS_PER_MULTIPROCESSOR
        programs = len(folds.state_slots) * layers * heads
    else:
        tile = fold_tile(dim, state_dim, by_channel, scales is not None)
        tiles = cdiv(dim, tile["BLOCK_P"]) * cdiv(state_dim, tile["BLOCK_N"])
        kernel, own, each = _fold_kernel, tile | {"CHANNELS": by_channel}, PROGRAMS_PER_MULTIPROCESSOR
        programs = len(folds.state_slots) * layers * heads * tiles
    targets = folds.state_slots if folds.write_state_slots is None else folds.write_state_slots
    kernel[(min(programs, each * multiprocessors(states.device)),)](
        A, states, scales, values, keys, gates, folds.state_slots, targets, folds.rows, folds.start, folds.length,
        folds.state_lengths, folds.count, lengths, element_keys,
        states.stride(0), 0 if scales is None else scales.stride(0), values.stride(0), keys.stride(0), gates.stride(0),
        states.stride(1), states.stride(2), *scale_strides(scales),
        values.stride(1), keys.stride(1), gates.stride(1),
        L=layers, H=heads, P=dim, N=state_dim, NS=num_scales(state_dim), G=keys.shape[2], W=gates.shape[3],
        BLOCK_W=dot_width(gates.shape[3]), num_warps=4, **own, **pdl(states.device),
    )  # fmt: skip


def takes_words(states: Tensor, by_channel: bool) -> bool:
    """Whether codes are folded four at a time."""
    return states.dtype == torch.int8 and not by_channel and states.shape[-1] > 32 and states.shape[-1] % 4 == 0


def fold_tile(dim: int, state_dim: int, by_channel: bool, scaled: bool) -> dict[str, int]:
    """Tiles of a state [P, N]. With scales they have whole rows."""
    block_p = min(64, dot_width(dim))
    if not scaled:
        block_n = min(64 if by_channel else 128, dot_width(state_dim))
        return {"BLOCK_P": block_p, "BLOCK_N": block_n, "BLOCK_S": 1}
    blocks = code_blocks(state_dim)
    return blocks | {"BLOCK_P": max(16, min(block_p, (TILE if by_channel else 2 * TILE) // blocks["BLOCK_N"]))}
