"""Triton kernels of `mamba2_chunk_scan`: five launches over a plan's chunks (Dao & Gu 2024, section 6).

1. `_mamba2_time_step_kernel`: time steps, and running sums of A dt within each chunk, as [H, T].
2. `_mamba2_scores_kernel`: C B^T of each chunk and group, on and below the diagonal.
3. `_mamba2_gains_kernel`: what each chunk alone adds to the state, float32.
4. `_mamba2_pass_kernel`: walks each request's chunks; writes the state before each chunk to `heads`, and
   the last one to the pool.
5. `_mamba2_outputs_kernel`: each token's output from the state before its chunk and the chunk's tokens.

With few tokens launches take longer than their work. Then `walk_states`
(`scan_few_tokens_triton.py`) does 1, 3 and 4, and `_mamba2_outputs_kernel` computes the scores. Fixed
decays need one launch (`scan_fixed_decay_triton.py`).
"""

from itertools import product as combinations
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import ChunkPlan
from hybridrt.kernels.core.decay_sums_triton import finite_rate, split_gates
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2, zero_after
from hybridrt.kernels.core.launch_choice import LaunchChoice, Values, token_bucket, unique
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.mamba.scan_few_tokens_triton import ScanWork, block, chunk_span, walk_states
from hybridrt.kernels.mamba.scan_fixed_decay_triton import decays_are_fixed, fixed_decay_scan
from hybridrt.kernels.state.conv_and_gates_triton import silu, strides, time_step

FEW_TOKENS = 512  # tokens of a step: up to so many, launches take longer than what they do one after the other
LEAST_TOKENS, MOST_TOKENS = 64, 8192  # bounds of `Scan.tokens`


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile; without a mask if whole, which saves registers."""
    if WHOLE:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@jit_kernel(do_not_specialize=["num_tokens"])
def _mamba2_time_step_kernel(  # type: ignore[no-untyped-def]
    dt_ptr, A_ptr, dt_bias_ptr, step_ptr, cum_ptr, rest_ptr, cu_chunks_ptr, dt_st: tl.constexpr, num_tokens,
    dt_min, dt_max, H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    chunk = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    first, end = tl.load(cu_chunks_ptr + chunk), tl.load(cu_chunks_ptr + chunk + 1)
    token = first + tl.arange(0, BLOCK_Q)
    mask = (token < end)[:, None] & (h < H)[None, :]
    dt = dt_ptr + token.to(tl.int64)[:, None] * dt_st + h[None, :]
    step = tl.where(mask, time_step(dt, dt_bias_ptr, h[None, :], mask, dt_min, dt_max), 0.0)
    A = finite_rate(tl.load(A_ptr + h, mask=h < H, other=0.0))
    gates, rest = split_gates(step * A[None, :], BLOCK_Q)
    cum, rest = tl.cumsum(gates, axis=0), tl.cumsum(rest, axis=0)
    place = h.to(tl.int64)[None, :] * num_tokens + token[:, None]
    tl.store(step_ptr + place, step * tl.exp(-rest), mask=mask)
    tl.store(cum_ptr + place, cum, mask=mask)
    tl.store(rest_ptr + place, rest, mask=mask)


@jit_kernel(do_not_specialize=["num_tokens"])
def _mamba2_gains_kernel(  # type: ignore[no-untyped-def]
    x_ptr, B_ptr, step_ptr, cum_ptr, rest_ptr, gains_ptr, cu_chunks_ptr,
    x_strides: tl.constexpr, B_strides: tl.constexpr, num_tokens,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block, h, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p = block // tl.cdiv(N, BLOCK_N) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = block % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # 64-bit starts and 32-bit offsets halve the registers of addresses.
    start, size = chunk_span(cu_chunks_ptr, chunk)
    if size == 0:  # a graph has as many chunks as any step of its size
        return
    step_row, cum_row = step_ptr + h.to(tl.int64) * num_tokens + start, cum_ptr + h.to(tl.int64) * num_tokens + start
    x_source = x_ptr + start * x_strides[0] + h * x_strides[1] + p[None, :]
    B_source = B_ptr + start * B_strides[0] + (h // HEADS_PER_GROUP) * B_strides[1] + n[None, :]
    total, all_rest = tl.load(cum_row + size - 1), tl.load(rest_ptr + h.to(tl.int64) * num_tokens + start + size - 1)
    gain = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for offset in range(0, size, BLOCK_K):
        token = tl.minimum(offset + k, size - 1)  # past the end the last one, with weight 0
        weight = tl.load(step_row + token) * tl.exp(total - tl.load(cum_row + token))
        weight = tl.where(offset + k < size, weight, 0.0)
        x = _load(x_source + token[:, None] * x_strides[0], (p < P)[None, :], P % BLOCK_P == 0)
        key = _load(B_source + token[:, None] * B_strides[0], (n < N)[None, :], N % BLOCK_N == 0)
        weighted = (x.to(tl.float32) * weight[:, None]).to(key.dtype)
        gain = tl.dot(tl.trans(weighted), key, gain, input_precision="ieee")
    cells = gains_ptr + (chunk.to(tl.int64) * H + h) * (P * N) + p[:, None] * N + n[None, :]
    tl.store(cells, gain * tl.exp(all_rest), mask=(p < P)[:, None] & (n < N)[None, :])


@jit_kernel(do_not_specialize=["num_tokens"])
def _mamba2_pass_kernel(  # type: ignore[no-untyped-def]
    gains_ptr, cum_ptr, rest_ptr, states_ptr, entry_ptr, read_slots_ptr, write_slots_ptr, has_initial_ptr,
    cu_chunks_ptr, first_chunk_ptr, last_chunk_ptr, saves_ptr, states_ss: tl.constexpr, num_tokens,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    h, b = tl.program_id(1), tl.program_id(2)
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        return
    write = tl.load(write_slots_ptr + b).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    cells = states_ptr + h * SIZE + i
    has_initial = tl.zeros([BLOCK], tl.int32) + tl.load(has_initial_ptr + b).to(tl.int32) > 0
    state = tl.load(cells + read * states_ss, mask=mask & has_initial, other=0.0).to(tl.float32)
    cum_row, rest_row = cum_ptr + h.to(tl.int64) * num_tokens, rest_ptr + h.to(tl.int64) * num_tokens
    first_chunk = tl.load(first_chunk_ptr + b)
    place = (first_chunk.to(tl.int64) * H + h) * SIZE + i
    for chunk in range(first_chunk, tl.load(last_chunk_ptr + b) + 1):
        tl.store(entry_ptr + place, state.to(entry_ptr.dtype.element_ty), mask=mask)
        last = tl.load(cu_chunks_ptr + chunk + 1) - 1
        total = tl.load(cum_row + last) + tl.load(rest_row + last)
        state = state * tl.exp(total) + tl.load(gains_ptr + place, mask=mask, other=0.0)
        place += H * SIZE
        if saves_ptr is not None:
            save = tl.load(saves_ptr + chunk).to(tl.int64)
            if save > 0:
                tl.store(cells + save * states_ss, state.to(states_ptr.dtype.element_ty), mask=mask)
    tl.store(cells + write * states_ss, state.to(states_ptr.dtype.element_ty), mask=mask)


@jit_kernel
def _mamba2_scores_kernel(  # type: ignore[no-untyped-def]
    B_ptr, C_ptr, scores_ptr, cu_chunks_ptr, B_strides: tl.constexpr, C_strides: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    block, g, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m_block, s_block = block // tl.cdiv(Q, BLOCK_M), block % tl.cdiv(Q, BLOCK_M)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    s = s_block * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.load(cu_chunks_ptr + chunk)
    size = tl.load(cu_chunks_ptr + chunk + 1) - first
    if (s_block > m_block) | (m_block * BLOCK_M >= size):
        return
    n = tl.arange(0, BLOCK_K)
    C_source = C_ptr + g * C_strides[1] + (first + m).to(tl.int64)[:, None] * C_strides[0] + n[None, :]
    B_source = B_ptr + g * B_strides[1] + (first + s).to(tl.int64)[None, :] * B_strides[0] + n[:, None]
    scores = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for offset in range(0, N, BLOCK_K):
        inside = n + offset < N
        query = tl.load(C_source + offset, mask=(m < size)[:, None] & inside[None, :], other=0.0)
        key = tl.load(B_source + offset, mask=(s < size)[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(query, key, scores, input_precision="ieee")
    place = (chunk * G + g).to(tl.int64) * (Q * Q) + m[:, None] * Q + s[None, :]
    tl.store(scores_ptr + place, scores.to(scores_ptr.dtype.element_ty), mask=(m < size)[:, None] & (s < size)[None, :])


@jit_kernel(do_not_specialize=["num_tokens", "chunks"])
def _mamba2_outputs_kernel(  # type: ignore[no-untyped-def]
    x_ptr, B_ptr, C_ptr, z_ptr, out_ptr, D_ptr, step_ptr, cum_ptr, rest_ptr, entry_ptr, scores_ptr,
    read_slots_ptr, cu_chunks_ptr, seq_idx_ptr, x_strides: tl.constexpr, B_strides: tl.constexpr,
    C_strides: tl.constexpr, z_strides: tl.constexpr, out_st, out_sh, num_tokens, chunks,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M tokens and BLOCK_P channels of a head: BLOCK_N state columns at a time (all, without
    scores), then BLOCK_K earlier tokens.
    """
    begin(PDL)
    block, h, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = h // HEADS_PER_GROUP
    if scores_ptr is None:
        # Blocks of chunk c are numbered from cu_chunks[c] // BLOCK_M + c on: room for all. Idle
        # programs of a graph's spare chunks take time.
        number, each = chunk, tl.arange(0, BLOCK_CHUNKS)
        firsts = tl.load(cu_chunks_ptr + each, mask=each < chunks, other=0) // BLOCK_M + each
        chunk = tl.sum(((firsts <= number) & (each < chunks)).to(tl.int32), axis=0) - 1
        start, size = chunk_span(cu_chunks_ptr, chunk)
        m_first = (number - chunk - start.to(tl.int32) // BLOCK_M) * BLOCK_M
    else:
        start, size = chunk_span(cu_chunks_ptr, chunk)
        m_first = block // tl.cdiv(P, BLOCK_P) * BLOCK_M
    if m_first >= size:
        return
    dead = tl.load(read_slots_ptr + tl.load(seq_idx_ptr + chunk)) < 0
    m = m_first + tl.arange(0, BLOCK_M)
    token = tl.minimum(m, size - 1)  # past the end the last one: not written
    p = block % tl.cdiv(P, BLOCK_P) * BLOCK_P + tl.arange(0, BLOCK_P)
    p_mask = (p < P)[None, :]
    step_row, cum_row = step_ptr + h.to(tl.int64) * num_tokens + start, cum_ptr + h.to(tl.int64) * num_tokens + start
    cum, rest = tl.load(cum_row + token), tl.load(rest_ptr + h.to(tl.int64) * num_tokens + start + token)
    n = tl.arange(0, BLOCK_N)
    entry = entry_ptr + (chunk.to(tl.int64) * H + h) * (P * N) + p[None, :] * N + n[:, None]
    query = C_ptr + start * C_strides[0] + g * C_strides[1] + token[:, None] * C_strides[0] + n[None, :]
    y = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    for offset in range(0, N, BLOCK_N):
        inside = n + offset < N
        c = _load(query + offset, inside[None, :], N % BLOCK_N == 0)
        state = _load(entry + offset, inside[:, None] & p_mask, (N % BLOCK_N == 0) & (P % BLOCK_P == 0))
        y = tl.dot(c, state, y, input_precision="ieee")
    y *= tl.exp(cum)[:, None]

    k = tl.arange(0, BLOCK_K)
    if scores_ptr is None:
        keys = B_ptr + start * B_strides[0] + g * B_strides[1] + n[:, None]
        c = _load(query, (n < N)[None, :], N % BLOCK_N == 0)
    else:
        scores_row = scores_ptr + (chunk * (H // HEADS_PER_GROUP) + g).to(tl.int64) * (Q * Q) + token[:, None] * Q
    x_source = x_ptr + start * x_strides[0] + h * x_strides[1] + p[None, :]
    for offset in range(0, tl.minimum(m_first + BLOCK_M, size), BLOCK_K):
        s = offset + k
        earlier = tl.minimum(s, size - 1)
        # The minimum keeps later tokens' exponents finite; they have no scores.
        weight = tl.exp(tl.minimum(cum[:, None] - tl.load(cum_row + earlier)[None, :], 0.0))
        if scores_ptr is None:
            key = _load(keys + earlier[None, :] * B_strides[0], (n < N)[:, None], N % BLOCK_N == 0)
            scores = tl.dot(c, key, input_precision="ieee")
        else:
            scores = tl.load(scores_row + s[None, :]).to(tl.float32)
        weight *= scores * tl.load(step_row + earlier)[None, :]
        weight = tl.where(s[None, :] <= m[:, None], weight, 0.0)
        x = _load(x_source + earlier[:, None] * x_strides[0], p_mask, P % BLOCK_P == 0)
        y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
    y *= tl.exp(rest)[:, None]

    if D_ptr is not None:
        x = _load(x_source + token[:, None] * x_strides[0], p_mask, P % BLOCK_P == 0)
        y += x.to(tl.float32) * tl.load(D_ptr + h).to(tl.float32)
    if z_ptr is not None:
        gates = z_ptr + start * z_strides[0] + h * z_strides[1] + token[:, None] * z_strides[0] + p[None, :]
        y *= silu(_load(gates, p_mask, P % BLOCK_P == 0).to(tl.float32))
    # The state before a dead row's chunk was never written.
    y = tl.where(dead, 0.0, y).to(out_ptr.dtype.element_ty)
    outputs = out_ptr + start * out_st + h * out_sh + m[:, None] * out_st + p[None, :]
    tl.store(outputs, y, mask=(m < size)[:, None] & p_mask)


def mamba2_chunk_scan_triton(
    inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, out: Tensor | None = None
) -> Tensor:
    """`mamba2_chunk_scan` in five launches, in two or in one."""
    x, B, C, z, plan = inputs.x, inputs.B, inputs.C, inputs.z, prompts.plan
    (num_tokens, heads, dim), state_dim, chunks = x.shape, state.states.shape[3], len(plan.seq_idx)
    out = x.new_empty(x.shape) if out is None else out
    zero_after(out, plan.num_tokens)
    if decays_are_fixed(inputs, weights):
        fixed_decay_scan(inputs, weights, state, prompts, out)
        return out
    # Three tensors: parts of one would not always be aligned.
    step, cum, rest = (torch.empty((heads, num_tokens), dtype=torch.float32, device=x.device) for _ in range(3))
    entry_states = x.new_empty((chunks, heads, dim, state_dim))
    shape = {"H": heads, "P": dim, "N": state_dim, "HEADS_PER_GROUP": heads // B.shape[1]}
    work = ScanWork(step, cum, rest, entry_states, shape)
    few = _has_few(num_tokens, plan.chunk_size, state_dim)
    scores = None if few else _scores(B, C, plan)
    (walk_states if few else _gain_and_pass)(inputs, weights, state, prompts, work)
    if chunks:
        size = plan.chunk_size
        tile = OUTPUTS(_shape(x, B, size), x.device)
        blocks, channels = cdiv(size, tile["BLOCK_M"]), cdiv(dim, tile["BLOCK_P"])
        short = channels, heads, num_tokens // tile["BLOCK_M"] + chunks
        _mamba2_outputs_kernel[short if few else (blocks * channels, heads, chunks)](
            x, B, C, z, out, weights.D, step, cum, rest, entry_states, scores, state.read_state_slots,
            plan.cu_chunk_seqlens, plan.seq_idx, strides(x), strides(B), strides(C), strides(z), *strides(out),
            num_tokens, chunks, **shape, Q=_width(size),
            BLOCK_CHUNKS=max(64, next_power_of_2(chunks)) if few else 1, **tile, **pdl(x.device),
        )  # fmt: skip
    return out


def _width(size: int) -> int:
    """Rounds up to whole blocks: `_mamba2_outputs_kernel` reads scores without a mask."""
    return cdiv(size, 64) * 64


def _scores(B: Tensor, C: Tensor, plan: ChunkPlan) -> Tensor:
    """[chunks, G, Q, Q] in B's dtype."""
    width, (_, groups, state_dim), chunks = _width(plan.chunk_size), B.shape, len(plan.seq_idx)
    scores = B.new_empty((chunks, groups, width, width))
    _mamba2_scores_kernel[(width // 64) ** 2, groups, chunks](
        B, C, scores, plan.cu_chunk_seqlens, strides(B), strides(C),
        G=groups, N=state_dim, Q=width, BLOCK_M=64, BLOCK_K=64, **pdl(B.device),
    )  # fmt: skip
    return scores


def _gain_and_pass(inputs: SSMInputs, weights: SSMWeights, state: StateSlots, prompts: Prompts, work: ScanWork) -> None:
    x, cum, rest, entry_states, plan = inputs.x, work.cum, work.rest, work.entry_states, prompts.plan
    (chunks, heads, dim, state_dim), num_tokens = entry_states.shape, x.shape[0]
    launch, cu_chunks = pdl(x.device), plan.cu_chunk_seqlens
    gains = torch.empty(entry_states.shape, dtype=torch.float32, device=x.device)
    _mamba2_time_step_kernel[chunks, cdiv(heads, 4)](
        inputs.dt, weights.A, weights.dt_bias, work.step, cum, rest, cu_chunks, inputs.dt.stride(0), num_tokens,
        *weights.dt_limit, H=heads, BLOCK_Q=next_power_of_2(plan.chunk_size), BLOCK_H=4, **launch,
    )  # fmt: skip
    tile = GAINS(_shape(x, inputs.B, plan.chunk_size), x.device)
    _mamba2_gains_kernel[cdiv(dim, tile["BLOCK_P"]) * cdiv(state_dim, tile["BLOCK_N"]), heads, chunks](
        x, inputs.B, work.step, cum, rest, gains, cu_chunks, strides(x), strides(inputs.B), num_tokens, **work.shape,
        **tile, **launch,
    )  # fmt: skip
    _mamba2_pass_kernel[cdiv(dim * state_dim, 1024), heads, len(state.read_state_slots)](
        gains, cum, rest, state.states, entry_states, state.read_state_slots, state.write_state_slots,
        prompts.has_initial_state, cu_chunks, plan.first_chunk,
        plan.last_chunk, None if prompts.saves is None else prompts.saves.chunk_slots, state.states.stride(0),
        num_tokens, H=heads, SIZE=dim * state_dim, BLOCK=1024, **launch,
    )  # fmt: skip


def gains_tile(dim: int, state_dim: int) -> dict[str, int]:
    """Tile of a chunk's gain [P, N], and how many tokens are multiplied at a time; as measured on an H200."""
    return {"BLOCK_P": block(dim, 64), "BLOCK_N": block(state_dim, 256), "BLOCK_K": 16, "num_warps": 4, "num_stages": 4}


def outputs_tile(size: int, dim: int, state_dim: int) -> dict[str, int]:
    """Tile of a chunk's outputs [Q, P]: all of P, so that weights of earlier tokens are computed
    once. With these sizes three programs fit on a multiprocessor.
    """
    return {
        "BLOCK_M": block(size, 64), "BLOCK_P": block(dim, 128), "BLOCK_K": 32, "BLOCK_N": block(state_dim, 64),
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


def few_outputs_tile(size: int, shape: "Scan") -> dict[str, int]:
    """Tile of outputs in a step of few tokens, with all state columns; a program computes the
    scores.

    H200, both launches, 128 / 512 tokens: Falcon-H1-7B 12.5 / 31.4 us (14.9 / 36.4 with 32 earlier
    tokens at a time); Falcon-H1-0.5B with its few heads 10.4 / 20.6 (11.2 / 26.6 with Nemotron-H's
    tile). Larger float32 tiles, which tensor cores do not take, would not fit into registers.
    """
    heads, dim, state_dim = shape.heads, shape.dim, shape.state_dim
    fewest = shape.tokens <= 256
    if shape.dtype.itemsize > 2:
        tile = {"BLOCK_M": 32, "BLOCK_P": 32, "BLOCK_K": 32, "num_stages": 2}
    elif state_dim > 128:
        tile = {"BLOCK_M": 64, "BLOCK_P": 64 if fewest else 128, "BLOCK_K": 64, "num_stages": 2 if fewest else 1}
    elif heads <= 64:
        tile = {"BLOCK_M": 64 if fewest else 32, "BLOCK_P": 64, "BLOCK_K": 128, "num_stages": 1}
    else:
        tile = {"BLOCK_M": 64, "BLOCK_P": 64, "BLOCK_K": 32, "num_stages": 2}
    limits = {"BLOCK_M": size, "BLOCK_P": dim, "BLOCK_K": size}
    tile |= {name: block(limit, tile[name]) for name, limit in limits.items()}
    return tile | {"BLOCK_N": block(state_dim, 256), "num_warps": 4}


class Scan(NamedTuple):
    """What the tiles of a scan may depend on. tokens: a power of two, from LEAST_TOKENS to MOST_TOKENS."""

    tokens: int
    heads: int
    groups: int
    dim: int
    state_dim: int
    chunk_size: int
    dtype: torch.dtype


def _shape(x: Tensor, B: Tensor, chunk_size: int) -> Scan:
    tokens = token_bucket(x.shape[0], LEAST_TOKENS, MOST_TOKENS)
    return Scan(tokens, x.shape[1], B.shape[1], x.shape[2], B.shape[2], chunk_size, x.dtype)


def _has_few(tokens: int, chunk_size: int, state_dim: int) -> bool:
    """Whether a scan takes two launches."""
    return tokens <= FEW_TOKENS and max(chunk_size, state_dim) <= 256


def _built_in_gains(shape: Scan, _: torch.device) -> Values:
    return gains_tile(shape.dim, shape.state_dim)


def _built_in_outputs(shape: Scan, _: torch.device) -> Values:
    size, state_dim = shape.chunk_size, shape.state_dim
    if _has_few(shape.tokens, size, state_dim):
        return few_outputs_tile(size, shape)
    return outputs_tile(size, shape.dim, state_dim)


def _gains_candidates(shape: Scan, device: torch.device) -> list[Values]:
    """Fewer state columns for more programs, more tokens at a time, more warps."""
    tile = _built_in_gains(shape, device)
    tiles: list[Values] = [
        {
            **tile,
            "BLOCK_N": block(shape.state_dim, n),
            "BLOCK_K": k,
            "num_warps": warps,
            "num_stages": 4 if k < 64 else 3,
        }
        for n, k, warps in combinations((64, 128, 256), (16, 32, 64), (4, 8))
    ]
    return unique(tiles)


def _outputs_candidates(shape: Scan, device: torch.device) -> list[Values]:
    """BLOCK_N of a scan of few tokens is the whole state."""
    tile = _built_in_outputs(shape, device)
    if shape.dtype.itemsize > 2:  # larger tiles would not fit into registers
        return [tile]
    limits = {"BLOCK_M": shape.chunk_size, "BLOCK_P": shape.dim, "BLOCK_K": shape.chunk_size}
    tiles: list[Values] = []
    for m, p, k, warps in combinations((32, 64), (64, 128), (32, 64, 128), (4, 8)):
        wanted = {"BLOCK_M": m, "BLOCK_P": p, "BLOCK_K": k}
        blocks = {name: block(limit, wanted[name]) for name, limit in limits.items()}
        tiles.append({**tile, **blocks, "num_warps": warps, "num_stages": 3 if k == 32 else 1})
    return unique(tiles)


GAINS: LaunchChoice[Scan, dict[str, int]] = LaunchChoice(
    "mamba2_chunk_scan: gains", Scan, _built_in_gains, _gains_candidates, dict
)
OUTPUTS: LaunchChoice[Scan, dict[str, int]] = LaunchChoice(
    "mamba2_chunk_scan: outputs", Scan, _built_in_outputs, _outputs_candidates, dict
)
