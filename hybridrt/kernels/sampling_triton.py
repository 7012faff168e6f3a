"""Triton kernels of sampling. Nothing is sorted: a filter is a threshold on the logits, found by bisection.

A row's vocabulary is split among programs for what streams over it once, and one program a row bisects.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.launch import multiprocessors
from hybridrt.kernels.sampling import GOLDEN_GAMMA, MIX_1, MIX_2, STREAM_TOKEN, Penalties

BLOCK = 4096
PROGRAMS_PER_MULTIPROCESSOR = 8
_GAMMA, _MIX_1, _MIX_2 = (tl.constexpr(value % 2**64) for value in (GOLDEN_GAMMA, MIX_1, MIX_2))


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, index, stream, ids):  # type: ignore[no-untyped-def]
    """The values of `uniform_reference` for one row, bit for bit."""
    seed = seed.to(tl.uint64, bitcast=True) + (stream + 1).to(tl.uint64) * _GAMMA
    key = _mix(_mix(seed) + index.to(tl.uint64, bitcast=True) * _GAMMA)
    bits = _mix(key + (ids + 1).to(tl.uint64) * _GAMMA)
    value = (bits >> 1).to(tl.int64, bitcast=True).to(tl.float32) * 1.0842021724855044e-19  # 2^-63
    return tl.minimum(tl.maximum(value, 5.421010862427522e-20), 0.99999994039535522)  # 2^-64, 1 - 2^-24


@triton.jit
def _log_exponential(u):  # type: ignore[no-untyped-def]
    """log(-log(1 - u)), minus a Gumbel variable: exact for small u, where draws are decided (Kahan's log1p)."""
    rest = 1.0 - u
    lost = rest == 1.0
    log1p = tl.where(lost, -u, tl.log(rest) * (-u / tl.where(lost, 1.0, rest - 1.0)))
    return tl.log(-log1p)


@triton.jit
def _allowed(bitmask_ptr, b, ids, mask, words):  # type: ignore[no-untyped-def]
    word = tl.load(bitmask_ptr + b * words + ids // 32, mask=mask, other=0)
    return ((word >> (ids % 32)) & 1) == 1


@triton.jit
def _penalized(  # type: ignore[no-untyped-def]
    x, b, ids, mask, V, repetition_ptr, presence_ptr, frequency_ptr, counts_ptr, prompt_ptr, counts_sr, prompt_sr
):
    factor = tl.load(repetition_ptr + b)
    count = tl.load(counts_ptr + b * counts_sr + ids, mask=mask, other=0)
    in_prompt = tl.load(prompt_ptr + b * prompt_sr + ids, mask=mask, other=0) != 0
    repeated = tl.where(x > 0, x / factor, x * factor)
    x = tl.where((count > 0) | in_prompt, repeated, x) - tl.load(frequency_ptr + b) * count
    return x - tl.where(count > 0, tl.load(presence_ptr + b), 0.0)


@triton.jit
def _prepare_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, temperature_ptr, bitmask_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, counts_ptr, prompt_ptr,
    logits_sr, counts_sr, prompt_sr, words, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bitmask, penalties and temperature: [B, V] float32."""
    b = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    x = tl.load(logits_ptr + b * logits_sr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if bitmask_ptr is not None:
        x = tl.where(_allowed(bitmask_ptr, b, ids, mask, words), x, float("-inf"))
    if counts_ptr is not None:
        x = _penalized(x, b, ids, mask, V, repetition_ptr, presence_ptr, frequency_ptr, counts_ptr, prompt_ptr,
                       counts_sr, prompt_sr)  # fmt: skip
    temperature = tl.load(temperature_ptr + b)
    tl.store(out_ptr + b * V + ids, x / tl.where(temperature == 0, 1.0, temperature), mask=mask)


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """int32 in the order of the floats; its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bisect(row_ptr, V, low, high, wanted, largest, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest key of the row with at least `wanted` at or above it: entries, or with MASS their exp(x - largest).

    `low` is known to satisfy that and `high` not to. Each pass halves the interval and shrinks it to keys that occur.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        total = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        below = tl.full([BLOCK], -0x7FFFFFFF, tl.int32)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
            key = _key(x)
            inside = (key >= middle) & (ids < V)
            weight = 1.0
            if MASS:
                weight = tl.exp(x - largest)
            total += tl.where(inside, weight, 0.0)
            above = tl.where(inside, tl.minimum(above, key), above)
            below = tl.where((key < middle) & (ids < V), tl.maximum(below, key), below)
        if tl.sum(total, 0) >= wanted:
            low = tl.min(above, 0).to(tl.int64)
        else:
            high = tl.max(below, 0).to(tl.int64) + 1
    return low


@triton.jit
def _threshold_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, threshold_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V, BLOCK: tl.constexpr
):
    """The lowest logit that each row keeps."""
    b = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + b * V
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")))
    largest = tl.max(best, 0)
    low = tl.full([], -0x7FFFFFFF, tl.int64)
    high = _key(largest).to(tl.int64) + 1
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + b)
        if (top_k > 0) & (top_k < V):
            low = _bisect(row_ptr, V, low, high, top_k.to(tl.float32), largest, False, BLOCK)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + b)
        if top_p < 1:
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, V, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf"))
                total += tl.where(_key(x) >= low, tl.exp(x - largest), 0.0)
            low = _bisect(row_ptr, V, low, high, top_p * tl.sum(total, 0), largest, True, BLOCK)
    low = low.to(tl.int32)
    threshold = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    threshold = tl.where(low == -0x7FFFFFFF, float("-inf"), threshold)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b)
        if min_p > 0:
            threshold = tl.maximum(threshold, largest + tl.log(min_p))
    tl.store(threshold_ptr + b, threshold)


@triton.jit
def _filter_kernel(logits_ptr, threshold_ptr, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    x = tl.load(logits_ptr + b * V + ids, mask=mask, other=0.0)
    tl.store(logits_ptr + b * V + ids, tl.where(x >= tl.load(threshold_ptr + b), x, float("-inf")), mask=mask)


# How a row is split follows the batch size, which changes from step to step: no reason to compile anew.
@triton.jit(do_not_specialize=["per_split", "splits"])
def _argmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bitmask_ptr, threshold_ptr, temperature_ptr, seeds_ptr, indices_ptr, best_ptr, tokens_ptr,
    logits_sr, words, V, per_split, splits, STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best entry of each row and split, the first of equal ones; with seeds, of the Gumbel-perturbed row."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = split * per_split
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + tl.arange(0, BLOCK)
    for start in range(first, min(first + per_split, V), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        mask = ids < V
        x = tl.load(logits_ptr + b * logits_sr + ids, mask=mask, other=float("-inf")).to(tl.float32)
        if bitmask_ptr is not None:
            x = tl.where(_allowed(bitmask_ptr, b, ids, mask, words), x, float("-inf"))
        if threshold_ptr is not None:
            x = tl.where(x >= tl.load(threshold_ptr + b), x, float("-inf"))
        if seeds_ptr is not None:
            u = _uniform(tl.load(seeds_ptr + b), tl.load(indices_ptr + b), tl.full([], STREAM, tl.int64), ids)
            x -= tl.where(tl.load(temperature_ptr + b) == 0, 0.0, _log_exponential(u))
        better = x > best
        best_id = tl.where(better, ids, best_id)
        best = tl.where(better, x, best)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, best_id, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + b * splits + split, token.to(tl.int64))
    tl.store(best_ptr + b * splits + split, largest)


@triton.jit(do_not_specialize=["splits"])
def _reduce_kernel(best_ptr, candidates_ptr, tokens_ptr, splits, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    best = tl.load(best_ptr + b * splits + s, mask=s < splits, other=float("-inf"))
    candidates = tl.load(candidates_ptr + b * splits + s, mask=s < splits, other=0x7FFFFFFF)
    tl.store(tokens_ptr + b, tl.min(tl.where(best == tl.max(best, 0), candidates, 0x7FFFFFFF), 0))


@triton.jit
def _uniform_kernel(seeds_ptr, indices_ptr, ids_ptr, out_ptr, n, STREAM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, mask=i < n, other=0).to(tl.int64)
    u = _uniform(tl.load(seeds_ptr + b), tl.load(indices_ptr + b), tl.full([], STREAM, tl.int64), ids)
    tl.store(out_ptr + b * n + i, u, mask=i < n)


def uniform_triton(seed: Tensor, index: Tensor, stream: int, ids: Tensor) -> Tensor:
    out = torch.empty(seed.shape[0], ids.shape[0], dtype=torch.float32, device=seed.device)
    if out.numel():
        grid = (out.shape[0], triton.cdiv(out.shape[1], BLOCK))
        _uniform_kernel[grid](seed, index, ids, out, out.shape[1], STREAM=stream, BLOCK=BLOCK)
    return out


def greedy_triton(logits: Tensor, bitmask: Tensor | None = None) -> Tensor:
    return _argmax(logits, bitmask=bitmask)


def sample_triton(
    logits: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    indices: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
    bitmask: Tensor | None = None,
) -> Tensor:
    """Prepare, threshold (where a filter is on), draw: three to four launches, one pass each but for the bisection."""
    prepared = _prepare(logits, temperature, penalties, bitmask)
    threshold = _thresholds(prepared, top_k, top_p, min_p)
    return _argmax(prepared, threshold=threshold, temperature=temperature, seeds=seeds, indices=indices)


def filtered_logits_triton(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    penalties: Penalties | None = None,
    bitmask: Tensor | None = None,
) -> Tensor:
    prepared = _prepare(logits, temperature, penalties, bitmask)
    threshold = _thresholds(prepared, top_k, top_p, min_p)
    if threshold is not None and prepared.numel():
        batch, vocabulary = prepared.shape
        _filter_kernel[(batch, triton.cdiv(vocabulary, BLOCK))](prepared, threshold, vocabulary, BLOCK=BLOCK)
    return prepared


def _prepare(logits: Tensor, temperature: Tensor, penalties: Penalties | None, bitmask: Tensor | None) -> Tensor:
    batch, vocabulary = logits.shape
    out = torch.empty(batch, vocabulary, dtype=torch.float32, device=logits.device)
    p = penalties
    if batch:
        _prepare_kernel[(batch, triton.cdiv(vocabulary, BLOCK))](
            logits, out, temperature, bitmask,
            *((None,) * 5 if p is None else (p.repetition, p.presence, p.frequency, p.output_counts, p.prompt_mask)),
            logits.stride(0), *((0, 0) if p is None else (p.output_counts.stride(0), p.prompt_mask.stride(0))),
            0 if bitmask is None else bitmask.stride(0), vocabulary, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def _thresholds(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor | None:
    if top_k is None and top_p is None and min_p is None:
        return None
    batch, vocabulary = logits.shape
    threshold = torch.empty(batch, dtype=torch.float32, device=logits.device)
    if batch:
        _threshold_kernel[(batch,)](logits, threshold, top_k, top_p, min_p, vocabulary, BLOCK=BLOCK, num_warps=16)
    return threshold


def _argmax(
    logits: Tensor,
    *,
    bitmask: Tensor | None = None,
    threshold: Tensor | None = None,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    batch, vocabulary = logits.shape
    if batch == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    blocks = triton.cdiv(vocabulary, BLOCK)
    # A program reads one block after the other: only many of them keep enough bytes under way.
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(logits.device), batch)
    per_split = triton.cdiv(blocks, min(blocks, wanted)) * BLOCK
    splits = triton.cdiv(vocabulary, per_split)
    best = torch.empty(batch, splits, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(batch, splits, dtype=torch.int64, device=logits.device)
    _argmax_kernel[(batch, splits)](
        logits, bitmask, threshold, temperature, seeds, indices, best, tokens, logits.stride(0),
        0 if bitmask is None else bitmask.stride(0), vocabulary, per_split, splits,
        STREAM=STREAM_TOKEN, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    if splits == 1:
        return tokens.view(batch)
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _reduce_kernel[(batch,)](best, tokens, out, splits, BLOCK_S=triton.next_power_of_2(blocks), num_warps=1)
    return out
