"""Triton kernels of paged decode attention.

Flash attention (Dao et al. 2022) over parts of a context (flash decoding, Dao et al. 2023). The query heads of one
key/value head share a tile, so a key is loaded once: tile row m is token m // GROUPS and head m %
GROUPS. Scores are in units of log 2.

Keys of a latent cache have D + ROPE numbers, in two parts so that each width is a power of two; the
first D are also the values. Other caches have ROPE = 0.

Codes of e4m3 are converted when they are loaded. Their scales are factors of the scores and of the
sums: `v_scale` is None for plain numbers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors, shared_memory
from hybridrt.base.errors import ConfigError
from hybridrt.kernels.attention.decode_shares_triton import blocks_of, of_row, parts_of, parts_of_rows, row_of
from hybridrt.kernels.attention.kv_codes_triton import as_stored, for_products, inverse_scale, numbers_of_pairs
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import (
    LARGE_SHARED_MEMORY,
    arrival_counters,
    cdiv,
    dot_precision,
    dot_width,
    next_power_of_2,
)
from hybridrt.kernels.core.launch_choice import LaunchChoice, Values, unique
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.core.records import AttentionRows, PagedKV
from hybridrt.kernels.core.tiles_triton import LOG2_E

BLOCK_N = 64  # context positions per tile
BLOCK_M = 64  # query rows per tile at most; `_tile` says for which dtypes and heads both are halved
PROGRAMS_PER_MULTIPROCESSOR, WIDE_PER_MULTIPROCESSOR = 4, 6  # heads up to 128, and wider ones
UNCUT_CONTEXT = 2048  # where no context can be longer and the device is full anyway, none is cut
PART = 1024  # positions that a part has at least, about, if a row's last program joins any number of parts
# A row has at most MOST_PARTS, half as many of latent vectors. Joining parts takes time: a row has more than FEW_PARTS
# only if each has some blocks.
FEW_PARTS, MOST_PARTS = 64, 256
# By a tile's numbers of a head, and whether these are codes. A row's last program joins up to JOINED_PARTS if the
# device has more than the first number of multiprocessors for each key/value head of each row, and fewer than the
# second. The third number: shares of the work for each multiprocessor then. Where the device is full it joins any
# number of parts, with two shares.
JOINED_WITH = {(64, False): (1, 3, 2), (128, False): (2, 5, 1), (128, True): (1, 5, 1)}
JOINED_PARTS = 8  # one program loads a part in about 0.25 us
PARTS_AT_ONCE, WIDE_AT_ONCE = 64, 32  # loaded together by `_attention_join_kernel`


@triton.jit
def _depth(sees, node, node_mask, sees_st, T: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.arange(0, BLOCK_T)
    mask = node_mask[:, None] & (t < T)[None, :]
    seen = tl.load(sees + node[:, None] * sees_st + t[None, :], mask=mask, other=0)
    return tl.sum((seen != 0).to(tl.int32), 1) - 1


@jit_kernel(do_not_specialize=["rows"])
def _attention_decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, seq_lens_ptr, sees_ptr, drafts_ptr, out_ptr, partial_ptr, lse_ptr,
    arrivals_ptr, sinks_ptr, rows, q_sb, q_st, q_sh, table_sr, sees_sb, sees_st, out_st, scale_log2,
    v_scale, T: tl.constexpr, HKV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    WINDOW: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr, LEAST: tl.constexpr, JOIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_B: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [key heads and blocks of their query rows, parts of rows]: programs without a part start last. ROOM = 0: a
    row is one part. The last program of a row joins its parts if these are at most JOIN.

    AHEAD: the slots of the next block of keys are loaded in this block's turn, and held in registers. Without it the
    compiler gives slots a stage of the pipeline, so that one block of keys less is on its way.
    """
    head_block, own_part = tl.program_id(0), tl.program_id(1)
    b, first_part, number, used = own_part, own_part, 0, 1
    if ROOM > 0:
        share, parts = parts_of_rows(seq_lens_ptr, rows, T, WINDOW, ROOM, FEW, LEAST, JOIN > 0, BLOCK_N, BLOCK_B)
        b, first_part = row_of(own_part, parts)
        if b >= rows:
            return  # before `begin`: a row's first part waits there, and the kernel ends after it
        number = own_part - first_part
    seq_len = tl.load(seq_lens_ptr + b)
    table = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_sr
    keys = seq_len
    if drafts_ptr is not None:
        keys -= T - 1 - tl.load(drafts_ptr + b)  # padding follows
    origin, blocks = blocks_of(seq_len, T, WINDOW, BLOCK_N)
    first, end = 0, blocks
    if ROOM > 0:
        part, used = parts_of(blocks, share, FEW, LEAST, JOIN > 0)
        first, end = number * part, tl.minimum((number + 1) * part, blocks)
    if AHEAD:
        pos = origin + first * BLOCK_N + tl.arange(0, BLOCK_N)
        slot = tl.load(table + pos, mask=pos < keys, other=0).to(tl.int64)
    begin(PDL)
    m_blocks: tl.constexpr = (T * GROUPS + BLOCK_M - 1) // BLOCK_M
    kv_head = head_block // m_blocks
    m = (head_block % m_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    live, token, head = m < T * GROUPS, m // GROUPS, kv_head * GROUPS + m % GROUPS
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    mask = live[:, None] & (d < D)[None, :]
    q_row = q_ptr + b.to(tl.int64) * q_sb + token * q_st + head * q_sh
    q = for_products(tl.load(q_row[:, None] + d[None, :], mask=mask, other=0.0), k_ptr.dtype.element_ty)
    q_rope = q
    if ROPE > 0:
        q_rope = tl.load(q_row[:, None] + D + r[None, :], mask=live[:, None] & (r < ROPE)[None, :], other=0.0)
        q_rope = for_products(q_rope, k_ptr.dtype.element_ty)
    depth = token
    if sees_ptr is not None:
        sees = sees_ptr + b.to(tl.int64) * sees_sb
        if WINDOW > 0:
            depth = _depth(sees, token, live, sees_st, T, BLOCK_T)
    # Codes of values are loaded in pairs of columns, and sums of first and of second columns are apart.
    PAIRS: tl.constexpr = v_ptr.dtype.element_ty == tl.float8e4nv and ROPE == 0 and D % 2 == 0
    WIDTH: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    second = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # Parts are joined by their sums of exponentials. The first one has the sink.
        row_max = tl.where(number == 0, tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2_E, row_max)
        row_sum += tl.where(number == 0, 1.0, 0.0)
    for block in range(first, end):
        pos = origin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        in_context = pos < keys
        if WINDOW > 0:
            in_context &= pos > seq_len - T - WINDOW  # earlier pages may be another request's by now
        node = pos - (seq_len - T)  # a token of the T; negative before them
        key_depth = node
        if sees_ptr is not None:
            new_key = in_context & (node >= 0)
            named = sees + token[:, None] * sees_st + node[None, :]
            named = tl.load(named, mask=live[:, None] & new_key[None, :], other=0) != 0
            visible = in_context[None, :] & ((node < 0)[None, :] | named)
            if WINDOW > 0:
                key_depth = tl.where(node < 0, node, _depth(sees, node, new_key, sees_st, T, BLOCK_T))
        else:
            visible = in_context[None, :] & (node[None, :] <= token[:, None])
        if WINDOW > 0:
            visible &= depth[:, None] - key_depth[None, :] < WINDOW
        # `in_context` guards loads; `visible` guards scores: other keys get no weight.
        if not AHEAD:
            slot = tl.load(table + pos, mask=in_context, other=0).to(tl.int64)
        base = (slot * HKV + kv_head) * (D + ROPE)
        key_mask = in_context[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + base[:, None] + d[None, :], mask=key_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if ROPE > 0:
            rope_mask = in_context[:, None] & (r < ROPE)[None, :]
            k_rope = tl.load(k_ptr + base[:, None] + D + r[None, :], mask=rope_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION)
        if AHEAD:
            pos += BLOCK_N
            slot = tl.load(table + pos, mask=pos < keys, other=0).to(tl.int64)
        scores = tl.where(visible, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing keeps -inf; 0 in its place prevents NaN differences.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        if PAIRS:
            c = tl.arange(0, WIDTH)
            cells = v_ptr.to(tl.pointer_type(tl.int16)) + (base // 2)[:, None] + c[None, :]
            pairs = tl.load(cells, mask=in_context[:, None] & (c < D // 2)[None, :], other=0)
            v, v_second = numbers_of_pairs(pairs)
            second *= rescale[:, None]
            second += tl.dot(weights.to(q.dtype), v_second.to(q.dtype), input_precision=PRECISION)
        elif ROPE > 0:
            v = k
        else:
            v = tl.load(v_ptr + base[:, None] + d[None, :], mask=key_mask, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        row_max, row_sum = new_max, row_sum * rescale + tl.sum(weights, 1)
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    if PAIRS:
        acc = tl.reshape(tl.join(acc, second), [BLOCK_M, BLOCK_D])
    y = acc / row_sum[:, None]
    if v_scale is not None:
        y *= v_scale
    finished = ROOM == 0
    if ROOM > 0:
        parted = True
        if JOIN > 0:
            parted, finished = used > 1, used <= 1
        if parted:
            apart: tl.constexpr = T * HKV * GROUPS  # numbers of a part, but for their width
            cell = token * (HKV * GROUPS) + head
            own = own_part.to(tl.int64) * apart + cell
            tl.store(partial_ptr + own[:, None] * D + d[None, :], y, mask=mask)
            tl.store(lse_ptr + own, row_max + tl.log2(row_sum), mask=live)
            if JOIN > 0:  # noqa: SIM102  # in one condition the branch would be compiled without arrivals too
                if used <= JOIN:
                    arrivals = arrivals_ptr + b * tl.num_programs(0) + head_block
                    tl.debug_barrier()  # publish stores
                    if tl.atomic_add(arrivals, 1, sem="acq_rel") == used - 1:
                        tl.store(arrivals, 0)
                        first_own = first_part.to(tl.int64) * apart + cell
                        y = _join(partial_ptr, lse_ptr, first_own, apart, used, live, d, D, BLOCK_M, BLOCK_D)
                        finished = parted  # True: both branches need one type
    if finished:
        cells = out_ptr + ((b.to(tl.int64) * T + token) * out_st + head * D)[:, None] + d[None, :]
        tl.store(cells, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, first, apart: tl.constexpr, used, live, d, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The output of a row's `used` parts, added in their order. `apart`: numbers from one part's to the next one's."""
    # The next parts of small tiles are on their way to shared memory, which the loop over keys has left. That the parts
    # were stored is known since the arrivals were counted.
    STAGES: tl.constexpr = 4 if BLOCK_M == 16 and BLOCK_D <= 128 else 1
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for s in tl.range(0, used, num_stages=STAGES):
        largest = tl.maximum(largest, tl.load(lse_ptr + first + s * apart, mask=live, other=0.0, cache_modifier=".cg"))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for s in tl.range(0, used, num_stages=STAGES):
        own = first + s * apart
        weight = tl.exp2(tl.load(lse_ptr + own, mask=live, other=0.0, cache_modifier=".cg") - largest)
        cells = partial_ptr + own[:, None] * D + d[None, :]
        mask = live[:, None] & (d < D)[None, :]
        acc += tl.load(cells, mask=mask, other=0.0, cache_modifier=".cg") * weight[:, None]
        total += weight
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@jit_kernel(do_not_specialize=["rows"])
def _attention_join_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, seq_lens_ptr, out_ptr, rows, out_st,
    T: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, ROOM: tl.constexpr,
    FEW: tl.constexpr, LEAST: tl.constexpr, JOIN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_S: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token and head of a row of more than JOIN parts; others are joined. EARLY: loads the first parts with their
    sums, which needs registers."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, parts = parts_of_rows(seq_lens_ptr, rows, T, WINDOW, ROOM, FEW, LEAST, JOIN > 0, BLOCK_N, BLOCK_B)
    first_part, used = of_row(b, parts)
    joined = used <= JOIN
    if joined & (b + head > 0):
        return  # the first program waits in any case: what follows this launch may rely on those before it
    begin(PDL)
    if joined:
        return
    d, s, part = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S), tl.arange(0, PARTS)
    first = first_part.to(tl.int64) * (T * HQ) + head
    lse = tl.load(lse_ptr + first + s * (T * HQ), mask=s < used, other=float("-inf"))
    if EARLY:
        lse_here, partial = _parts(partial_ptr, lse_ptr, first, part, used, d, T * HQ, D)
    largest = tl.max(lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest), 0)
    total = tl.where(total == 0, 1.0, total)
    if not EARLY:
        lse_here, partial = _parts(partial_ptr, lse_ptr, first, part, used, d, T * HQ, D)
    out = tl.sum(partial * (tl.exp2(lse_here - largest) / total)[:, None], 0)
    for start in range(PARTS, used, PARTS):
        lse_here, partial = _parts(partial_ptr, lse_ptr, first, start + part, used, d, T * HQ, D)
        out += tl.sum(partial * (tl.exp2(lse_here - largest) / total)[:, None], 0)
    cells = out_ptr + (b * T + head // HQ) * out_st + (head % HQ) * D + d
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _parts(partial_ptr, lse_ptr, first, part, used, d, APART: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Log sums of exponentials [P], and outputs [P, len(d)]."""
    row = first + part * APART
    lse = tl.load(lse_ptr + row, mask=part < used, other=float("-inf"))
    mask = (part < used)[:, None] & (d < D)[None, :]
    return lse, tl.load(partial_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0)


def attention_decode_triton(q: Tensor, kv: PagedKV, batch: AttentionRows, out: Tensor | None = None) -> Tensor:
    """One launch attends. A second one joins the parts of rows that have more than their last program joins (`_walk`),
    and is left out if no row can have so many.

    What is cut depends on shapes and lengths on the device, not on max_len: a graph's replay and an eager call of
    the same batch give the same bits.
    """
    req_to_token, mask = kv.req_to_token, batch.mask
    (num_rows, tokens, query_heads, key_dim), (kv_heads, head_dim) = q.shape, kv.v_cache.shape[2:]
    rope, window, context = key_dim - head_dim, kv.sliding_window or 0, req_to_token.shape[1]
    shape = Decode(num_rows, tokens, query_heads, kv_heads, head_dim, rope, context, window, kv.coded, q.dtype)
    tile = DECODES(shape, q.device)
    head_blocks, room, join = shape.head_blocks(tile["BLOCK_M"]), tile["ROOM"], tile["JOIN"]
    if out is None:
        out = q.new_empty(*q.shape[:3], head_dim)
    token_stride = _token_stride(out)
    partial = lse = arrivals = None
    parts = num_rows
    if room:
        parts = 2 * room + num_rows
        partial = torch.empty(parts, tokens, query_heads, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
        arrivals = arrival_counters(req_to_token, num_rows * head_blocks) if join else None
    sharing = {name: tile[name] for name in ("ROOM", "FEW", "LEAST", "JOIN", "BLOCK_N", "BLOCK_D")}
    sharing["BLOCK_B"] = next_power_of_2(num_rows)
    _attention_decode_kernel[(head_blocks, parts)](
        q, kv.k_cache, kv.v_cache, req_to_token, batch.rows, batch.seq_lens, mask, batch.num_drafts, out, partial,
        lse, arrivals, kv.sinks, num_rows, q.stride(0), q.stride(1), q.stride(2), req_to_token.stride(0),
        0 if mask is None else mask.stride(0), 0 if mask is None else mask.stride(1),
        token_stride, kv.score_scale * LOG2_E.value, kv.v_scale if kv.coded else None,
        T=tokens, HKV=kv_heads, GROUPS=query_heads // kv_heads, D=head_dim, ROPE=rope, WINDOW=window,
        BLOCK_R=dot_width(rope), BLOCK_T=next_power_of_2(tokens), PRECISION=dot_precision(q.dtype),
        **(tile | sharing), **pdl(q.device),
    )  # fmt: skip
    most = _most_parts(room, shape.span, tile["BLOCK_N"])
    if most > join:
        wide, most = tile["BLOCK_D"] > 256, next_power_of_2(most)
        loaded = min(most, WIDE_AT_ONCE if wide else PARTS_AT_ONCE)
        # EARLY takes registers. With more than a program for each multiprocessor, a parallel branch (Mamba-2 in
        # Falcon-H1) could not run there.
        early = wide or num_rows * tokens * query_heads <= multiprocessors(q.device)
        _attention_join_kernel[(num_rows, tokens * query_heads)](
            partial, lse, batch.seq_lens, out, num_rows, token_stride, T=tokens, HQ=query_heads, D=head_dim,
            WINDOW=window, **sharing, BLOCK_S=most, PARTS=loaded, EARLY=early,
            num_warps=8 if wide and loaded > 8 else 4, **pdl(q.device),
        )  # fmt: skip
    return out


def _token_stride(out: Tensor) -> int:
    """Token stride of out [B, T, Hq, D]; ConfigError if it is not uniform."""
    batch, tokens, heads, dim = out.shape
    stride = out.stride(1) if tokens > 1 else out.stride(0)
    apart = out.stride(3) != 1 or (heads > 1 and out.stride(2) != dim)
    if apart or (batch > 1 and out.stride(0) != tokens * stride):
        raise ConfigError(f"out has strides {out.stride()}; heads must be contiguous and tokens equally far apart")
    return stride


def _most_parts(room: int, max_context: int, block_n: int) -> int:
    """Parts of one row: no more than if each but the last had half a share of the work, which has ROOM shares."""
    return min(2 * room, cdiv(max_context, block_n))


def _walk(
    rows: int, head_blocks: int, max_context: int, tile: dict[str, int], device: torch.device, coded: bool = False
) -> dict[str, int]:
    """How programs walk through keys, and how many share the contexts of the batch, by the batch size and the longest
    context alone: changes to `_tile`.

    JOIN: parts that a row's last program joins at most. None with few rows, since a launch of its own then joins them
    faster. With more rows that launch waits for multiprocessors, which a parallel branch (Mamba-2 in Falcon-H1) has: it
    joins rows of many parts only, for which one program is slow. Measured on an H200.
    """
    size, programs = multiprocessors(device), rows * head_blocks
    if tile["BLOCK_D"] > 256:
        return _walk_latent(rows, head_blocks, max_context, tile["BLOCK_N"], device, coded)
    large = tile["BLOCK_M"] > 32 or tile["BLOCK_D"] > 128
    over, below, shares = JOINED_WITH.get((tile["BLOCK_D"], coded), (0, 0, 0))
    joined_before_full = tile["BLOCK_M"] == 16 and programs * over < size < programs * below
    loads = _loads(tile, programs, size, joined_before_full, coded)
    block_n = loads.get("BLOCK_N", tile["BLOCK_N"])
    few, least = FEW_PARTS, 4
    if joined_before_full:
        # Rows of equal length have no more parts than their last programs join.
        join, room = JOINED_PARTS, min(cdiv(shares * size, head_blocks), JOINED_PARTS * rows // 2)
    elif programs >= size and not large:
        join, room, few, least = MOST_PARTS, cdiv(2 * size, head_blocks), 1, cdiv(PART, block_n)
    else:
        each = PROGRAMS_PER_MULTIPROCESSOR if tile["BLOCK_D"] <= 128 else WIDE_PER_MULTIPROCESSOR
        join, room = 0, cdiv(each * size, 2 * head_blocks)
    whole = max_context <= block_n
    if join:
        whole = room == 1 or (2 * room <= 3 * rows and max_context <= UNCUT_CONTEXT)
    return loads | {"ROOM": 0 if whole else min(room, MOST_PARTS // 2), "FEW": few, "LEAST": least, "JOIN": join}


def _loads(tile: dict[str, int], programs: int, size: int, joined_before_full: bool, coded: bool) -> dict[str, int]:
    """Keys of a block, warps, blocks on their way, and whether slots are loaded ahead, for heads of up to 256 numbers.

    If programs (key/value heads of all rows) fill the device, two warps are best. With up to two programs for each
    multiprocessor, each has a block of keys more on its way (AHEAD); more of them need registers more than that.
    Another stage helps narrow heads. With 128 numbers a head, its shared memory would keep a parallel branch waiting.
    Rows too few for a join have short blocks, several on their way. Over codes, blocks are twice as long if programs
    just fill the device, or rows are joined before it is full.
    """
    narrow, full = tile["BLOCK_M"] == 16 and tile["BLOCK_D"] <= 128, programs >= size
    large, few_programs = tile["BLOCK_M"] > 32 or tile["BLOCK_D"] > 128, programs <= 2 * size
    if coded and narrow:
        keys = tile["BLOCK_N"] * (4 if joined_before_full or (full and few_programs) else 2)
        return {"BLOCK_N": keys, "num_warps": 4 if few_programs else 2, "num_stages": 3, "AHEAD": 1}
    if joined_before_full:
        return {"num_warps": 4, "num_stages": 3, "AHEAD": 1}
    if large:
        return {"num_stages": 2 + coded, "AHEAD": 1}
    if full:
        stages = 4 if coded or (few_programs and tile["BLOCK_D"] <= 64) else 3
        return {"num_warps": 2 if narrow else 4, "num_stages": stages, "AHEAD": int(few_programs or coded)}
    return {"BLOCK_N": min(32, tile["BLOCK_N"]), "num_stages": 3 + 2 * coded, "AHEAD": 1}


def _walk_latent(
    rows: int, head_blocks: int, max_context: int, block_n: int, device: torch.device, coded: bool = False
) -> dict[str, int]:
    """Latent vectors need a whole multiprocessor's shared memory: one program runs there at a time."""
    size = multiprocessors(device)
    each = max(size // max(rows * head_blocks, 1), 1)  # programs of a row
    stages = 3 if shared_memory(device) >= LARGE_SHARED_MEMORY else 2
    whole = max_context <= (UNCUT_CONTEXT if each == 1 else block_n)
    room = 0 if whole else min(cdiv(size, 2 * head_blocks), MOST_PARTS // 4)
    few, least = (1, 1) if each > 2 else (each, cdiv(PART, block_n))
    join = MOST_PARTS if each == 1 else 0
    return {"num_stages": stages + coded, "AHEAD": 1, "ROOM": room, "FEW": few, "LEAST": least, "JOIN": join}


def _tile(rows: int, head_dim: int, dtype: torch.dtype, coded: bool) -> dict[str, int]:
    """Codes are converted in registers, which larger tiles would fill (compiled for sm_90)."""
    block_d, halved = dot_width(head_dim), dtype == torch.float32
    max_rows = BLOCK_M >> (halved + (block_d > 256))  # registers cannot hold sums of 64 rows of 512 numbers
    block_m = min(dot_width(rows), max(16, max_rows))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": max(16, BLOCK_N >> (halved or coded)),
        "BLOCK_D": block_d,
        "num_warps": 8 if block_m * block_d > 8192 or (coded and block_d > 256) else 4,
    }


class Decode(NamedTuple):
    """What a decode launch may depend on. context: width of the page table, in positions."""

    rows: int
    tokens: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope: int
    context: int
    window: int
    coded: bool
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Upper bound of the positions in tiles that a row reads. A window's first and last tile have others too."""
        return min(self.context, self.window + self.tokens + 2 * BLOCK_N) if self.window else self.context

    @property
    def rows_per_head(self) -> int:
        """Query rows that share a key/value head."""
        return self.tokens * self.query_heads // self.kv_heads

    def head_blocks(self, block_m: int) -> int:
        """Programs of a part."""
        return self.kv_heads * cdiv(self.rows_per_head, block_m)


def _built_in(shape: Decode, device: torch.device) -> Values:
    tile = _tile(shape.rows_per_head, shape.head_dim, shape.dtype, shape.coded)
    head_blocks = shape.head_blocks(tile["BLOCK_M"])
    while True:
        whole = tile | _walk(max(shape.rows, 1), head_blocks, shape.span, tile, device, shape.coded)
        if tile["BLOCK_N"] == 16 or _loaded_bytes(shape, whole) <= shared_memory(device):
            return whole
        tile["BLOCK_N"] //= 2


def _candidates(shape: Decode, device: torch.device) -> list[Values]:
    """Other keys at a time, warps, stages, or slots in the turn of their keys. How contexts are shared stays: it is for
    contexts of all lengths."""
    built_in = _built_in(shape, device)
    tiles = [built_in]
    for keys in (built_in["BLOCK_N"] // 2, built_in["BLOCK_N"] * 2):
        least = max(1, built_in["LEAST"] * built_in["BLOCK_N"] // max(keys, 1))
        tiles += [{**built_in, "BLOCK_N": keys, "LEAST": least}] if 16 <= keys <= 128 else []
    tiles += [{**built_in, "num_warps": warps} for warps in (2, 4, 8)]
    tiles += [{**built_in, "num_stages": stages} for stages in (2, 3, 4, 5)]
    tiles += [] if shape.rope else [{**built_in, "AHEAD": 1 - built_in["AHEAD"], "num_stages": n} for n in (3, 4)]
    return unique([tile for tile in tiles if _loaded_bytes(shape, tile) <= shared_memory(device)])


def _loaded_bytes(shape: Decode, tile: Values) -> int:
    """Shared memory of a program: queries, keys and values on their way, and a tile's softmax weights."""
    latent = tile["BLOCK_D"] > 256
    width = (1 if latent else 2) * tile["BLOCK_D"] + (dot_width(shape.rope) if shape.rope else 0)
    keys = (tile["num_stages"] - 1) * tile["BLOCK_N"] * width * (1 if shape.coded else shape.dtype.itemsize)
    query = tile["BLOCK_D"] + (dot_width(shape.rope) if shape.rope else 0) + tile["BLOCK_N"]
    return keys + tile["BLOCK_M"] * query * shape.dtype.itemsize


DECODES: LaunchChoice[Decode, dict[str, int]] = LaunchChoice("attention_decode", Decode, _built_in, _candidates, dict)


@jit_kernel
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_inverse, v_inverse, k_st, k_sh, v_st, v_sh,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < PAGE:
        return
    mask = (h < HKV) & (d < D)
    target = slot * (HKV * D) + h * D + d
    k = tl.load(k_ptr + t * k_st + h * k_sh + d, mask=mask)
    v = tl.load(v_ptr + t * v_st + h * v_sh + d, mask=mask)
    tl.store(k_cache_ptr + target, as_stored(k, k_inverse, k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + target, as_stored(v, v_inverse, v_cache_ptr.dtype.element_ty), mask=mask)


def write_kv_triton(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor, k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:  # fmt: skip
    """One program a token."""
    tokens, kv_heads, head_dim = k.shape
    _write_kv_kernel[(tokens,)](
        k, v, k_cache, v_cache, out_cache_loc, inverse_scale(k_cache, k_scale), inverse_scale(v_cache, v_scale),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HKV=kv_heads, D=head_dim, PAGE=k_cache.shape[1], BLOCK_H=next_power_of_2(kv_heads),
        BLOCK_D=next_power_of_2(head_dim), **pdl(k.device),
    )  # fmt: skip
