"""Triton `mamba2_decode` in replay mode, in two launches.

Only the checkpoint is large. So the first kernel runs the conv, enters the new tokens into the ring
and reduces the ring to scores,

    y_t = exp(s_t) S C_t + sum_c scores[t, c] x_c,  scores[t, c] = dt_c exp(s_t - s_c) (B_c . C_t)

with c over the ring's columns up to that of token t, and s_t the sum of A dt from the ring's oldest
column to that of token t (`mamba2_replay.py`). The second multiplies the checkpoint S with all C_t in
one pass.
"""

import torch
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.decay_sums_triton import finite_rate
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, dot_precision, dot_width, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, begin_in_turn, pdl
from hybridrt.kernels.core.records import FusedStep, SSMWeights
from hybridrt.kernels.state.conv_and_gates_triton import (
    conv_one_token,
    conv_ring,
    conv_taps,
    conv_tokens,
    push_inputs,
    silu,
    step_input,
    strides,
    time_step,
)
from hybridrt.kernels.state.state_codes import SCALED
from hybridrt.kernels.state.state_codes_triton import (
    TILE,
    load_scales,
    load_words,
    multiply_words,
    scale_strides,
    state_scales,
)
from hybridrt.kernels.state.state_ring_triton import exact_dot, multiply_codes, multiply_state, products

# Most rows of states, batch * H * P, for which programs of 16 rows are fastest: FEW_ROWS for one token and states of 16
# bits, else SOME_ROWS. With more of the former, programs of 64 rows are.
FEW_ROWS, SOME_ROWS = 1 << 13, 1 << 16


@jit_kernel
def _mamba2_prepare_kernel(  # type: ignore[no-untyped-def]
    xBC_ptr, dt_ptr, weight_ptr, bias_ptr, A_ptr, dt_bias_ptr, conv_ptr, values_ptr, keys_ptr, gates_ptr,
    queries_ptr, scores_ptr, decays_ptr, slots_ptr, positions_ptr, rows_ptr, start_ptr, length_ptr,
    xBC_strides: tl.constexpr, dt_strides: tl.constexpr, conv_ss: tl.constexpr,
    values_sr: tl.constexpr, keys_sr: tl.constexpr, gates_sr: tl.constexpr, dt_min, dt_max,
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
    TAPS: tl.constexpr, WC: tl.constexpr, W: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr, SECTION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows, G + x blocks]: programs of a group do its B, C and heads; the others a block of x
    channels. SECTION: only "groups" or "values".
    """
    b, part = tl.program_id(0), tl.program_id(1)
    if SECTION == "values":
        part += G
    slot, position = tl.load(slots_ptr + b).to(tl.int64), tl.load(positions_ptr + b)
    row = tl.load(rows_ptr + b).to(tl.int64)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    conv_row = conv_ptr + tl.maximum(slot, 0) * conv_ss
    source = xBC_ptr + b.to(tl.int64) * xBC_strides[0]
    st: tl.constexpr = xBC_strides[1]
    if SECTION != "groups" and part >= G:
        # New x goes to the conv ring raw, and to the state ring after the conv.
        values_row, block, first = values_ptr + row * values_sr, part - G, start + length
        c = block * BLOCK_X + tl.arange(0, BLOCK_X)
        mask = c < tl.where(slot < 0, 0, H * P)  # padding reads and writes nothing
        ring, taps = None, None
        if TAPS > 0 and T == 1:
            ring, taps = conv_ring(conv_row, c, mask, WC), conv_taps(weight_ptr, c, mask, TAPS, WC)
        begin_in_turn(PDL)
        cells = values_row + (c // P) * (W * P) + c % P
        if TAPS > 0 and T > 1:
            push_inputs(source + c, st, conv_row, c, mask, position, T, WC)
        for t in tl.static_range(T):
            if TAPS == 0:
                x = silu(tl.load(source + t * st + c, mask=mask, other=0.0).to(tl.float32)).to(source.dtype.element_ty)
            elif T == 1:
                x = conv_one_token(source + c, conv_row, weight_ptr, bias_ptr, c, mask, position, TAPS, WC, ring, taps)
            else:
                x = step_input(source + c, st, conv_row, weight_ptr, bias_ptr, c, mask, position, t, TAPS, WC)
            tl.store(cells + ((first + t) % W) * P, x.to(values_ptr.dtype.element_ty), mask=mask)
    if SECTION != "values" and part < G:
        # A group's new B and C, its heads' time steps, and the ring's scores.
        dt_row = dt_ptr + b.to(tl.int64) * dt_strides[0]
        keys_row, gates_row = keys_ptr + row * keys_sr, gates_ptr + row * gates_sr
        n = tl.arange(0, BLOCK_N)
        n_mask = n < tl.where(slot < 0, 0, N)
        B_channel = H * P + part * N + n
        C_channel = B_channel + G * N
        heads_per_group: tl.constexpr = H // G
        i = tl.arange(0, BLOCK_H)
        h, h_mask = part * heads_per_group + i, i < tl.where(slot < 0, 0, heads_per_group)
        A = finite_rate(tl.load(A_ptr + h, mask=h_mask, other=0.0))
        w = tl.arange(0, BLOCK_W)
        seen = w < length
        column = (start + w) % W
        gates_rows = gates_row + h * W
        cells = gates_rows[:, None] + column[None, :]
        gate = tl.load(cells, mask=h_mask[:, None] & seen[None, :], other=0.0)
        later_cells = gates_rows[:, None] + ((start + w + 1) % W)[None, :]
        later = tl.load(later_cells, mask=h_mask[:, None] & (w + 1 < length)[None, :], other=0.0)
        keys_row += part * (W * N)
        keys = tl.load(keys_row + column[:, None] * N + n[None, :], mask=seen[:, None] & n_mask[None, :], other=0.0)
        B_ring, C_ring, B_taps, C_taps = None, None, None, None
        if TAPS > 0 and T == 1:
            B_ring, C_ring = conv_ring(conv_row, B_channel, n_mask, WC), conv_ring(conv_row, C_channel, n_mask, WC)
            B_taps = conv_taps(weight_ptr, B_channel, n_mask, TAPS, WC)
            C_taps = conv_taps(weight_ptr, C_channel, n_mask, TAPS, WC)
        total = tl.sum(gate * A[:, None], axis=1)
        history = gate * tl.exp(tl.cumsum(later * A[:, None], axis=1, reverse=True))
        begin_in_turn(PDL)

        # New tokens in order.
        BLOCK_T: tl.constexpr = 16 if T > 1 else 1
        t_all = tl.arange(0, BLOCK_T)
        new_keys = conv_tokens(
            source, st, conv_row, weight_ptr, bias_ptr, B_channel, n_mask, position, t_all, T, TAPS, WC, B_ring, B_taps
        )
        queries = conv_tokens(
            source, st, conv_row, weight_ptr, bias_ptr, C_channel, n_mask, position, t_all, T, TAPS, WC, C_ring, C_taps
        )
        token_mask = (t_all < T)[:, None] & n_mask[None, :]
        new_column = (start + length + t_all) % W
        tl.store(keys_row + new_column[:, None] * N + n[None, :], new_keys, mask=token_mask)
        queries_rows = queries_ptr + ((b * T + t_all) * G + part).to(tl.int64) * N
        tl.store(queries_rows[:, None] + n[None, :], queries, mask=token_mask)
        old_products, new_products = products(keys, queries, PRECISION), products(new_keys, queries, PRECISION)

        since = tl.zeros([BLOCK_H], tl.float32)
        fresh = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
        for t in range(T):
            dt = time_step(dt_row + t * dt_strides[1] + h, dt_bias_ptr, h, h_mask, dt_min, dt_max)
            tl.store(gates_rows + (start + length + t) % W, dt, mask=h_mask)
            since += A * dt
            is_t = t_all == t
            fresh = fresh * tl.exp(A * dt)[:, None] + tl.where(is_t[None, :], dt[:, None], 0.0)
            old = tl.sum(tl.where(is_t[None, :], old_products, 0.0), axis=1)
            new = tl.sum(tl.where(is_t[None, :], new_products, 0.0), axis=1)
            scores_row = scores_ptr + ((b * T + t) * H + h).to(tl.int64) * W
            old_cells = scores_row[:, None] + column[None, :]
            tl.store(old_cells, history * tl.exp(since)[:, None] * old[None, :], mask=h_mask[:, None] & seen[None, :])
            new_cells = scores_row[:, None] + new_column[None, :]
            tl.store(new_cells, fresh * new[None, :], mask=h_mask[:, None] & (t_all < T)[None, :])
            tl.store(decays_ptr + (b * T + t) * H + h, tl.exp(total + since), mask=h_mask)


@jit_kernel
def _mamba2_stream_kernel(  # type: ignore[no-untyped-def]
    z_ptr, D_ptr, out_ptr, states_ptr, scales_ptr, values_ptr, queries_ptr, scores_ptr, decays_ptr,
    slots_ptr, rows_ptr, start_ptr, length_ptr,
    z_strides: tl.constexpr, out_strides: tl.constexpr, states_ss: tl.constexpr, states_sh: tl.constexpr,
    scales_ss: tl.constexpr, scales_sh: tl.constexpr, values_sr: tl.constexpr,
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows, heads, tiles of P]: a checkpoint [P, N] is read once for T tokens. BLOCK_T is 1
    for products by element, else at least 16. In other products of codes, a tile of N has one scale.
    For one token, int8 codes are multiplied four at a time, in tiles with all of N.
    """
    b, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, n, w = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    p_mask = p < P
    slot = tl.load(slots_ptr + b).to(tl.int64)
    row = tl.load(rows_ptr + b).to(tl.int64)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    cells = states_ptr + tl.maximum(slot, 0) * states_ss + h * states_sh + p[:, None] * N + n[None, :]
    CODES: tl.constexpr = scales_ptr is not None
    if CODES:
        scales_row = scales_ptr + tl.maximum(slot, 0) * scales_ss + h * scales_sh
    WHOLE: tl.constexpr = BLOCK_N >= N
    WORDS: tl.constexpr = BLOCK_T == 1 and N % 4 == 0 and states_ptr.dtype.element_ty == tl.int8
    # The kernel before writes no state, and waits for all earlier ones.
    if WORDS:
        slot_head = states_ptr + tl.maximum(slot, 0) * states_ss + h * states_sh
        words, scales = load_words(slot_head, scales_row, p, P, N, BLOCK_N)
    elif WHOLE:
        state = tl.load(cells, mask=p_mask[:, None] & (n < N)[None, :], other=0.0)
        if CODES:
            scales = load_scales(scales_row, p, 0, P, N, BLOCK_N)
    begin(PDL)
    out = out_ptr + b.to(tl.int64) * out_strides[0] + t[:, None] * out_strides[1] + h * P + p[None, :]
    live = (t < T)[:, None] & p_mask[None, :]
    if slot < 0:
        tl.store(out, tl.zeros([BLOCK_T, BLOCK_P], out_ptr.dtype.element_ty), mask=live)
        return

    # These arrive after the first columns of the state.
    token = b * T + t
    newest = t[:, None] + length
    place = (start + w) % W
    queries_row = queries_ptr + (token * G + h // (H // G)).to(tl.int64)[:, None] * N
    queries = queries_row + n[None, :]
    scores = tl.load(
        scores_ptr + (token * H + h).to(tl.int64)[:, None] * W + place[None, :],
        mask=(t < T)[:, None] & (w[None, :] <= newest), other=0.0,
    )  # fmt: skip
    values_cells = values_ptr + row * values_sr + h * (W * P) + place[:, None] * P + p[None, :]
    values = tl.load(values_cells, mask=(w < length + T)[:, None] & p_mask[None, :], other=0.0)
    decays = tl.load(decays_ptr + token * H + h, mask=t < T, other=0.0)
    gate = tl.zeros([BLOCK_T, BLOCK_P], tl.float32)
    if z_ptr is not None:
        z_rows = z_ptr + b.to(tl.int64) * z_strides[0] + t[:, None] * z_strides[1] + h * z_strides[2]
        gate = tl.load(z_rows + p[None, :], mask=live, other=0.0).to(tl.float32)
    if D_ptr is not None:
        # The skip connection is one more weight on the token's own input.
        scores += tl.where(w[None, :] == newest, tl.load(D_ptr + h).to(tl.float32), 0.0)

    acc = tl.zeros([BLOCK_P, BLOCK_N if BLOCK_T == 1 else BLOCK_T], tl.float32)
    if WORDS:
        fours = 4 * tl.arange(0, BLOCK_N // 4)[:, None] + tl.arange(0, 4)[None, :]
        query = tl.load(queries_row + fours, mask=fours < N, other=0.0)
        acc = multiply_words(words, scales, query.to(tl.float32))[:, None]
    elif WHOLE:
        vectors = tl.load(queries, mask=(t < T)[:, None] & (n < N)[None, :], other=0.0)
        acc = multiply_codes(state, scales, vectors, acc) if CODES else multiply_state(state, vectors, acc)
    else:
        for first in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            n_mask = n < N - first
            mask = p_mask[:, None] & n_mask[None, :]
            if N % BLOCK_N == 0 and P % BLOCK_P == 0:
                state = tl.load(cells + first, eviction_policy="evict_first")
            else:
                state = tl.load(cells + first, mask=mask, other=0.0, eviction_policy="evict_first")
            vectors = tl.load(queries + first, mask=(t < T)[:, None] & n_mask[None, :], other=0.0)
            if CODES:
                acc = multiply_codes(state, load_scales(scales_row, p, first, P, N, BLOCK_N), vectors, acc)
            else:
                acc = multiply_state(state, vectors, acc)
    if BLOCK_T == 1:
        y = (tl.sum(acc, axis=1) * tl.sum(decays))[None, :]
        y += tl.sum(values.to(tl.float32) * tl.trans(scores), axis=0)[None, :]
    else:
        y = tl.trans(acc) * decays[:, None] + exact_dot(scores, values)
    if z_ptr is not None:
        y *= silu(gate)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=live)


def replay_decode_triton(
    xBC: Tensor, dt: Tensor, z: Tensor | None, weights: SSMWeights, step: FusedStep, out: Tensor | None = None
) -> Tensor:
    """`mamba2_decode` with a state ring."""
    weight, conv, states, ring = step.conv_weights.weight, step.conv_state.conv, step.state.states, step.ring
    assert ring is not None
    values, keys, gates = ring.values, ring.keys, ring.gates
    slots, cursors = step.conv_state.read_state_slots, (ring.rows, ring.start, ring.length)
    batch, tokens, _ = xBC.shape
    _, heads, dim, state_dim = states.shape
    groups, width = keys.shape[1], gates.shape[2]
    if out is None:
        out = xBC.new_empty((batch, tokens, heads, dim))
    queries = xBC.new_empty((batch, tokens, groups, state_dim))
    scores = torch.empty((batch, tokens, heads, width), dtype=torch.float32, device=xBC.device)
    decays = torch.empty((batch, tokens, heads), dtype=torch.float32, device=xBC.device)
    block_n, block_w = dot_width(state_dim), dot_width(width)
    # Wide states on four warps would need 214 registers and leave attention no room.
    warps = 8 if state_dim > 128 else 4
    block_x = 256 if batch >= 16 or warps == 8 else 128
    if batch >= 32 and warps == 8 and tokens == 1:
        block_x = 1024  # two such programs run on a multiprocessor: fewer take fewer turns (benchmarks/log/decode.md)
    common = {"T": tokens, "H": heads, "P": dim, "N": state_dim, "G": groups, "W": width, "BLOCK_W": block_w}
    x_blocks = cdiv(heads * dim, block_x)
    # A group's programs of several tokens need so many registers that those of x would wait.
    sections = {"all": groups + x_blocks} if tokens == 1 else {"values": x_blocks, "groups": groups}
    for section, programs in sections.items():
        _mamba2_prepare_kernel[batch, programs](
            xBC, dt, weight, step.conv_weights.bias, weights.A, weights.dt_bias, conv, values, keys, gates, queries,
            scores, decays, slots, step.conv_state.start_positions, *cursors, strides(xBC), strides(dt),
            conv.stride(0), values.stride(0), keys.stride(0), gates.stride(0), *weights.dt_limit,
            TAPS=weight.shape[1], WC=conv.shape[2], BLOCK_X=block_x, BLOCK_N=block_n, SECTION=section,
            BLOCK_H=next_power_of_2(heads // groups), PRECISION=dot_precision(xBC.dtype),
            num_warps=4 if section == "values" else warps, **common, **pdl(xBC.device),
        )  # fmt: skip
    scales = state_scales(step.state)
    tile = stream_tile(batch, tokens, states) if scales is None else codes_tile(batch, tokens, states)
    _mamba2_stream_kernel[batch, heads, cdiv(dim, tile["BLOCK_P"])](
        z, weights.D, out, states, scales, values, queries, scores, decays, slots, *cursors,
        strides(z), strides(out), states.stride(0), states.stride(1), *scale_strides(scales), values.stride(0),
        **tile, **common, **pdl(xBC.device),
    )  # fmt: skip
    return out


def codes_tile(batch: int, tokens: int, states: Tensor) -> dict[str, int]:
    """Tiles of codes in the second kernel, as measured on an H200. One token's products are of int8 codes, four at a
    time in whole rows, or of decoded numbers, element by element: of many rows, 64 columns at a time with three loads
    in flight. Those of several tokens are of whole codes, each block before its scale."""
    _, heads, dim, state_dim = states.shape
    rows, columns = (dot_width(size) for size in (dim, state_dim))
    if tokens == 1 and states.dtype == torch.int8 and state_dim % 4 == 0:
        block_p = min(rows, max(16, 2 * TILE // columns))
        return {"BLOCK_T": 1, "BLOCK_P": block_p, "BLOCK_N": columns, "STAGES": 1, "num_warps": 2}
    if tokens == 1 and batch * heads * dim <= SOME_ROWS:
        block_p = min(rows, max(16, TILE // columns))
        return {"BLOCK_T": 1, "BLOCK_P": block_p, "BLOCK_N": columns, "STAGES": 1, "num_warps": 4}
    if tokens == 1:
        tile = {"BLOCK_T": 1, "BLOCK_N": min(columns, 64)}
    else:
        tile = {"BLOCK_T": dot_width(tokens), "BLOCK_N": min(columns, SCALED)}
    return tile | {"BLOCK_P": min(rows, 64), "STAGES": 3, "num_warps": 4}


def stream_tile(batch: int, tokens: int, states: Tensor) -> dict[str, int]:
    """Tiles of the states [S+1, H, P, N] in the second kernel, as measured on an H200.

    Few programs load 16 rows of P with all of N before they wait for the kernel in front. Many
    programs have 64 rows or whole heads, 64 columns at a time, with three loads in flight. One token and
    a float32 state are multiplied element by element: three tensor-core products would cost more than
    the bytes.
    """
    _, heads, dim, state_dim = states.shape
    wide = states.element_size() == 4
    rows, columns = (dot_width(size) for size in (dim, state_dim))
    tile = {"BLOCK_T": 1 if tokens == 1 and wide else dot_width(tokens)}
    of_states = batch * heads * dim
    if of_states <= (FEW_ROWS if tokens == 1 and not wide else SOME_ROWS):
        return tile | {"BLOCK_P": 16, "BLOCK_N": columns, "STAGES": 1, "num_warps": 2}
    block_p, block_n = (64, 32 if tokens > 1 else 64) if wide or of_states <= SOME_ROWS else (128, 64)
    stages = 4 if wide and tokens > 1 else 3
    return tile | {"BLOCK_P": min(rows, block_p), "BLOCK_N": min(columns, block_n), "STAGES": stages, "num_warps": 4}
