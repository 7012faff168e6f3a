"""Triton kernel of `mamba2_chunk_scan` for heads with fixed decays (lightning attention): one launch.

A program takes a few channels of a head's state through all tokens of a request, block by block
(Dao & Gu 2024, section 6). Decays between two places of a block are the same in every block, so
nothing is prepared, and inputs are read once. With a the log of one token's decay, s its time step,
and h the state [P, N] before a block of Q tokens:

    y_i = exp(a (i + 1)) h C_i + s sum over j <= i of exp(a (i - j)) (C_i B_j) x_j
    h <- exp(a Q) h + s sum over j of exp(a (Q - 1 - j)) x_j B_j^T
"""

import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_precision
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.core.tiles_triton import LOG2_E, tile_mask
from hybridrt.kernels.mamba.scan_few_tokens_triton import block
from hybridrt.kernels.state.conv_and_gates_triton import strides

LOWEST = tl.constexpr(-256.0)  # log2 of a token's decay: 0, and 0 times it is 0, unlike that of -inf


@triton.jit
def _block_of(i, row_start, cut, next_cut, row_end, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token of a row's block i, and its length. Blocks of Q tokens end at both cuts, too."""
    to_cut = tl.cdiv(cut - row_start, Q)
    to_next = to_cut + tl.cdiv(next_cut - cut, Q)
    begin = tl.where(i < to_cut, row_start, tl.where(i < to_next, cut, next_cut))
    start = begin + (i - tl.where(i < to_cut, 0, tl.where(i < to_next, to_cut, to_next))) * Q
    end = tl.where(i < to_cut, cut, tl.where(i < to_next, next_cut, row_end))
    return start.to(tl.int64), tl.minimum(end - start, Q)


@jit_kernel
def _fixed_decay_walk_kernel(  # type: ignore[no-untyped-def]
    x_ptr, B_ptr, C_ptr, out_ptr, A_ptr, states_ptr, read_slots_ptr, write_slots_ptr, has_initial_ptr,
    starts_ptr, save_slots_ptr, save_lengths_ptr,
    x_strides: tl.constexpr, B_strides: tl.constexpr, C_strides: tl.constexpr, out_strides: tl.constexpr,
    states_ss: tl.constexpr, step, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [parts of P, heads, rows]."""
    begin(PDL)
    h, row = tl.program_id(1), tl.program_id(2)
    t, n, p = tl.arange(0, Q), tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    read, write = tl.load(read_slots_ptr + row).to(tl.int64), tl.load(write_slots_ptr + row).to(tl.int64)
    row_start, row_end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    cut, save, next_cut, next_save = row_start, read * 0, row_start, read * 0
    if save_slots_ptr is not None:
        cut, save = row_start + tl.load(save_lengths_ptr + 2 * row), tl.load(save_slots_ptr + 2 * row).to(tl.int64)
        next_cut = tl.maximum(row_start + tl.load(save_lengths_ptr + 2 * row + 1), cut)
        next_save = tl.load(save_slots_ptr + 2 * row + 1).to(tl.int64)
    out_ptr += h * out_strides[1]
    out_tile = t[:, None] * out_strides[0] + p[None, :]
    if read < 0:
        for token in range(row_start.to(tl.int64), row_end, Q):
            zeros = tl.zeros([Q, BLOCK_P], out_ptr.dtype.element_ty)
            live = tile_mask(token + t < row_end, p, P, BLOCK_P)
            tl.store(out_ptr + token * out_strides[0] + out_tile, zeros, mask=live)
        return

    x_ptr += h * x_strides[1]
    B_ptr += h // HEADS_PER_GROUP * B_strides[1]
    C_ptr += h // HEADS_PER_GROUP * C_strides[1]
    x_tile, B_tile = t[:, None] * x_strides[0] + p[None, :], t[:, None] * B_strides[0] + n[None, :]
    C_tile = t[:, None] * C_strides[0] + n[None, :]
    cells = states_ptr + h * (P * N) + p[None, :] * N + n[:, None]
    inside = (n < N)[:, None] & (p < P)[None, :]
    state = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    if tl.load(has_initial_ptr + row) != 0:
        state += tl.load(cells + read * states_ss, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(A_ptr + h) * step * LOG2_E
    rate = tl.where(rate < LOWEST, LOWEST, rate)
    apart = t[:, None] - t[None, :]
    pairs = step * tl.where(apart >= 0, tl.exp2(rate * tl.maximum(apart, 0).to(tl.float32)), 0.0)
    from_start = tl.exp2(rate * (t + 1).to(tl.float32))
    to_cut = tl.cdiv(cut - row_start, Q)
    to_next = to_cut + tl.cdiv(next_cut - cut, Q)
    for i in range(0, to_next + tl.cdiv(row_end - next_cut, Q)):
        start, size = _block_of(i, row_start, cut, next_cut, row_end, Q)
        live = t < size
        query = tl.load(C_ptr + start * C_strides[0] + C_tile, mask=tile_mask(live, n, N, BLOCK_N), other=0.0)
        key = tl.load(B_ptr + start * B_strides[0] + B_tile, mask=tile_mask(live, n, N, BLOCK_N), other=0.0)
        x = tl.load(x_ptr + start * x_strides[0] + x_tile, mask=tile_mask(live, p, P, BLOCK_P), other=0.0)
        to_end = step * tl.exp2(rate * tl.maximum(size - 1 - t, 0).to(tl.float32))
        total = tl.exp2(rate * size.to(tl.float32))
        held = state.to(key.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * pairs
        y = tl.dot(query, held, input_precision=PRECISION) * from_start[:, None]
        y = tl.dot(scores.to(x.dtype), x, y, input_precision=PRECISION)
        outputs = out_ptr + start * out_strides[0] + out_tile
        tl.store(outputs, y.to(out_ptr.dtype.element_ty), mask=tile_mask(live, p, P, BLOCK_P))
        weighted = (x.to(tl.float32) * to_end[:, None]).to(key.dtype)
        state = tl.dot(tl.trans(key), weighted, state * total, input_precision=PRECISION)
        slot = tl.where(i == to_cut - 1, save, tl.where(i == to_next - 1, next_save, 0))
        if slot > 0:
            tl.store(cells + slot * states_ss, state.to(states_ptr.dtype.element_ty), mask=inside)
    tl.store(cells + write * states_ss, state.to(states_ptr.dtype.element_ty), mask=inside)


def decays_are_fixed(inputs: SSMInputs, weights: SSMWeights) -> bool:
    """Whether this kernel serves a scan: limits leave one time step for all tokens, without skip or
    gate. With more than 256 state columns operands would not fit into shared memory.
    """
    shortest, longest = weights.dt_limit
    return shortest == longest and weights.D is None and inputs.z is None and inputs.B.shape[2] <= 256


def fixed_decay_scan(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, out: Tensor) -> None:
    """`mamba2_chunk_scan` of tokens whose `decays_are_fixed`; `out` [T, H, P] gets the outputs of the rows' tokens."""
    x, B, saves = inputs.x, inputs.B, prompts.saves
    (heads, dim), state_dim = x.shape[1:], B.shape[2]
    tile = walk_tile(prompts.plan.chunk_size, heads, dim, state_dim, x)
    _fixed_decay_walk_kernel[cdiv(dim, tile["BLOCK_P"]), heads, len(state.read_state_slots)](
        x, B, inputs.C, out, weights.A, state.states, state.read_state_slots, state.write_state_slots,
        prompts.has_initial_state, prompts.query_start_loc,
        *((None, None) if saves is None else (saves.row_slots, saves.row_lengths)), strides(x), strides(B),
        strides(inputs.C), strides(out), state.states.stride(0), weights.dt_limit[0], P=dim, N=state_dim,
        HEADS_PER_GROUP=heads // B.shape[1], PRECISION=dot_precision(x.dtype), **tile, **pdl(x.device),
    )  # fmt: skip


def walk_tile(chunk: int, heads: int, dim: int, state_dim: int, x: Tensor) -> dict[str, int]:
    """Tokens of a block, channels of a program, and how many blocks are on their way to it; as measured on an H200. A
    block takes 1.5 us with 64 channels and 1.1 with 16, so heads are cut up until one request fills the device."""
    narrow = x.itemsize > 2 or state_dim > 128
    block_p = 32 if narrow else 64
    while block_p > 16 and heads * cdiv(dim, block_p) * 2 <= multiprocessors(x.device):
        block_p //= 2
    return {
        "Q": block(chunk, 16 if x.itemsize > 2 else 64), "BLOCK_P": block(dim, block_p),
        "BLOCK_N": block(state_dim, 256), "num_warps": 4, "num_stages": 2 if narrow else 3 if block_p == 64 else 4,
    }  # fmt: skip
