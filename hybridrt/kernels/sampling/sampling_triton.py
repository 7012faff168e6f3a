"""Triton kernels of sampling: penalties, temperature, and a row's best entry, with noise for draws."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.sampling.sampling import GOLDEN_GAMMA, MIN_TEMPERATURE, MIX_1, MIX_2, STREAM_TOKEN, LogitFilters
from hybridrt.kernels.sampling.sampling_filters_triton import thresholds

BLOCK = 4096
PROGRAMS_PER_MULTIPROCESSOR = 8
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_GAMMA, _MIX_1, _MIX_2 = (tl.constexpr(value % 2**64) for value in (GOLDEN_GAMMA, MIX_1, MIX_2))


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, index, stream, ids):  # type: ignore[no-untyped-def]
    """`uniform.reference` for one row, bit for bit."""
    seed = seed.to(tl.uint64, bitcast=True) + (stream + 1).to(tl.uint64) * _GAMMA
    key = _mix(_mix(seed) + index.to(tl.uint64, bitcast=True) * _GAMMA)
    bits = _mix(key + (ids + 1).to(tl.uint64) * _GAMMA)
    value = (bits >> 1).to(tl.int64, bitcast=True).to(tl.float32) * 1.0842021724855044e-19  # 2^-63
    return tl.minimum(tl.maximum(value, 5.421010862427522e-20), 0.99999994039535522)  # 2^-64, 1 - 2^-24


@triton.jit
def _log_exponential(u):  # type: ignore[no-untyped-def]
    """log(-log(1 - u)), exact for small u, which decide draws (Kahan's log1p)."""
    rest = 1.0 - u
    lost = rest == 1.0
    log1p = tl.where(lost, -u, tl.log(rest) * (-u / tl.where(lost, 1.0, rest - 1.0)))
    return tl.log(-log1p)


@triton.jit
def _allowed(bitmask_ptr, b, ids, mask, words):  # type: ignore[no-untyped-def]
    word = tl.load(bitmask_ptr + b * words + ids // 32, mask=mask, other=0)
    return ((word >> (ids % 32)) & 1) == 1


# These arguments are rows of one tensor, aligned in some batches only.
@jit_kernel(do_not_specialize_on_alignment=["temperature_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"])
def _sampling_prepare_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, maxima_ptr, temperature_ptr, bitmask_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, counts_ptr, prompt_ptr,
    logits_sr, counts_sr, prompt_sr, words, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid [rows, blocks]: writes logits [B, V] float32, and each block's largest."""
    b = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    x = tl.load(logits_ptr + b * logits_sr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if bitmask_ptr is not None:
        x = tl.where(_allowed(bitmask_ptr, b, ids, mask, words), x, float("-inf"))
    if counts_ptr is not None:
        factor = tl.load(repetition_ptr + b)
        count = tl.load(counts_ptr + b * counts_sr + ids, mask=mask, other=0)
        in_prompt = tl.load(prompt_ptr + b * prompt_sr + ids, mask=mask, other=0) != 0
        repeated = tl.where(x > 0, x / factor, x * factor)
        x = tl.where((count > 0) | in_prompt, repeated, x) - tl.load(frequency_ptr + b) * count
        x -= tl.where(count > 0, tl.load(presence_ptr + b), 0.0)
    temperature = tl.load(temperature_ptr + b)
    x /= tl.where(temperature < _MIN_TEMPERATURE, 1.0, temperature)
    tl.store(out_ptr + b * V + ids, x, mask=mask)
    tl.store(maxima_ptr + b * tl.num_programs(1) + tl.program_id(1), tl.max(x, 0))


@jit_kernel(do_not_specialize=["blocks", "splits"], do_not_specialize_on_alignment=["temperature_ptr"])
def _argmax_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bitmask_ptr, threshold_ptr, temperature_ptr, seeds_ptr, indices_ptr, best_ptr, tokens_ptr,
    logits_sr, words, V, blocks, splits, STREAM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Finds the best entry of each row and split of `blocks` blocks; with seeds, of the
    Gumbel-perturbed row. NaN counts as infinity, which no filter drops. The token is -1 if the best
    is not finite.
    """
    begin(PDL)
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = split * blocks * BLOCK  # a multiple of BLOCK, for 16-byte loads
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + tl.arange(0, BLOCK)
    for start in range(first, min(first + blocks * BLOCK, V), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        mask = ids < V
        x = tl.load(logits_ptr + b * logits_sr + ids, mask=mask, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        if bitmask_ptr is not None:
            x = tl.where(_allowed(bitmask_ptr, b, ids, mask, words), x, float("-inf"))
        if threshold_ptr is not None:
            x = tl.where((x >= tl.load(threshold_ptr + b)) | (x == float("inf")), x, float("-inf"))
        if seeds_ptr is not None:
            u = _uniform(tl.load(seeds_ptr + b), tl.load(indices_ptr + b), tl.full([], STREAM, tl.int64), ids)
            x -= tl.where(tl.load(temperature_ptr + b) < _MIN_TEMPERATURE, 0.0, _log_exponential(u))
        better = x > best
        best_id = tl.where(better, ids, best_id)
        best = tl.where(better, x, best)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, best_id, 0x7FFFFFFF), 0)
    token = tl.where((largest == float("inf")) | ((splits == 1) & (largest == float("-inf"))), -1, token)
    tl.store(tokens_ptr + b * splits + split, token.to(tl.int64))
    tl.store(best_ptr + b * splits + split, largest)


@jit_kernel(do_not_specialize=["splits"])
def _sampling_reduce_kernel(  # type: ignore[no-untyped-def]
    best_ptr, candidates_ptr, tokens_ptr, splits, BLOCK_S: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    b = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    best = tl.load(best_ptr + b * splits + s, mask=s < splits, other=float("-inf"))
    candidates = tl.load(candidates_ptr + b * splits + s, mask=s < splits, other=0x7FFFFFFF)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, candidates, 0x7FFFFFFF), 0)
    tl.store(tokens_ptr + b, tl.where(largest == float("-inf"), -1, token))


def greedy_triton(logits: Tensor, bitmask: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    return _argmax(logits, bitmask, out=out)


def sample_triton(logits: Tensor, filters: LogitFilters, seeds: Tensor, indices: Tensor) -> Tensor:
    prepared, threshold = _filtered(logits, filters)
    return _argmax(prepared, None, threshold, (filters.temperature, seeds, indices))


def filtered_logits_triton(logits: Tensor, filters: LogitFilters) -> Tensor:
    prepared, threshold = _filtered(logits, filters)
    return prepared if threshold is None else prepared.where(prepared >= threshold[:, None], -torch.inf)


def _filtered(logits: Tensor, filters: LogitFilters) -> tuple[Tensor, Tensor | None]:
    """Logits `[B, V]` float32 before the filters, and each row's lowest kept one, or None."""
    p, bitmask = filters.penalties, filters.bitmask
    batch, vocabulary = logits.shape
    blocks = cdiv(vocabulary, BLOCK)
    out = torch.empty(batch, vocabulary, dtype=torch.float32, device=logits.device)
    maxima = torch.empty(batch, blocks, dtype=torch.float32, device=logits.device)
    _sampling_prepare_kernel[(batch, blocks)](
        logits, out, maxima, filters.temperature, bitmask,
        *((None,) * 5 if p is None else (p.repetition, p.presence, p.frequency, p.output_counts, p.prompt_mask)),
        logits.stride(0), *((0, 0) if p is None else (p.output_counts.stride(0), p.prompt_mask.stride(0))),
        0 if bitmask is None else bitmask.stride(0), vocabulary, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    if filters.top_k is None and filters.top_p is None and filters.min_p is None:
        return out, None
    return out, thresholds(out, maxima, BLOCK, filters.top_k, filters.top_p, filters.min_p)


def _argmax(
    logits: Tensor, bitmask: Tensor | None, threshold: Tensor | None = None,
    draw: Sequence[Tensor | None] = (None,) * 3, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, vocabulary = logits.shape
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch == 0:
        return out
    blocks = cdiv(vocabulary, BLOCK)
    # A program reads its blocks in sequence: many keep enough bytes in flight.
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(logits.device), batch)
    per_split = cdiv(blocks, min(blocks, wanted))
    splits = cdiv(blocks, per_split)
    best = torch.empty(batch, splits, dtype=torch.float32, device=logits.device)
    tokens = out if splits == 1 else torch.empty(batch, splits, dtype=torch.int64, device=logits.device)
    _argmax_kernel[(batch, splits)](
        logits, bitmask, threshold, *draw, best, tokens, logits.stride(0),
        0 if bitmask is None else bitmask.stride(0), vocabulary, per_split, splits,
        STREAM=STREAM_TOKEN, BLOCK=BLOCK, num_warps=8, **pdl(logits.device),
    )  # fmt: skip
    if splits > 1:
        _sampling_reduce_kernel[(batch,)](
            best, tokens, out, splits, BLOCK_S=next_power_of_2(blocks), num_warps=1, **pdl(out.device)
        )
    return out
