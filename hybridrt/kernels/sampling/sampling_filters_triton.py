"""Triton kernels of top-k, top-p and min-p without sorting: each row gets its lowest kept logit.

The first pass counts entries in bins by distance from the largest; counts bound the mass before
each bin. The second collects entries of the undecided bins. A bisection over them finds the exact
threshold. Masses are integers, 2^-40 of the largest apiece, so neither order nor batch neighbours
change a sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import next_power_of_2

BINS = tl.constexpr(256)
_FINE = tl.constexpr(192)  # bins of 1/16 up to 12 below the largest logit; the others 5/16 wide
_COLLECTED, _MASS_BEFORE, _MASS = (tl.constexpr(BINS.value + i) for i in range(3))
TALLY = tl.constexpr(BINS.value + 3)
_ONE = tl.constexpr(float(1 << 40))  # the largest entry's share
_SLACK = tl.constexpr(1.001)  # more than rounding moves a bound, or the last bin exceeds its nominal end
_NOISE = tl.constexpr(1e-6)  # share of all mass; more than the error of float32 differences
_LOWEST = tl.constexpr(-0x7FFFFFFF)
LIST_BLOCK = 1024


@triton.jit
def _in_order(bits):  # type: ignore[no-untyped-def]
    """Float32 bits as an int32 in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    return _in_order(x.to(tl.int32, bitcast=True))


@triton.jit
def _bin(x, largest):  # type: ignore[no-untyped-def]
    below = largest - x
    index = tl.where(below < 12.0, below * 16.0, _FINE + (below - 12.0) * 3.2)
    return tl.where(below < 32.0, index, BINS - 1.0).to(tl.int32)


@triton.jit
def _distance(j):  # type: ignore[no-untyped-def]
    return tl.where(j < _FINE, j * 0.0625, 12.0 + (j - _FINE) * 0.3125)


@triton.jit
def _mass(x, largest):  # type: ignore[no-untyped-def]
    return (tl.exp(x - largest) * _ONE).to(tl.int64)


@triton.jit
def _largest(maxima_ptr, b, blocks, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    s = tl.arange(0, BLOCK_S)
    return tl.max(tl.load(maxima_ptr + b * blocks + s, mask=s < blocks, other=float("-inf")), 0)


@triton.jit
def _limits(top_k_ptr, top_p_ptr, b):  # type: ignore[no-untyped-def]
    top_k, top_p = 0, 1.0
    if top_k_ptr is not None:
        top_k = tl.maximum(tl.load(top_k_ptr + b), 0)
    if top_p_ptr is not None:
        top_p = tl.minimum(tl.load(top_p_ptr + b), 1.0)
    return top_k, top_p


@triton.jit
def _undecided(tally_ptr, b, top_k, top_p):  # type: ignore[no-untyped-def]
    """(first, last, entries before first) of the bins that may hold the threshold. With both
    filters they end at top-k's bin: top-p is a share of top-k's mass.
    """
    j = tl.arange(0, BINS)
    counts = tl.load(tally_ptr + b * TALLY + j)
    before = tl.cumsum(counts, 0) - counts
    last = tl.where(top_k > 0, tl.sum((before + counts < top_k).to(tl.int32), 0), BINS - 1)
    first = last
    if top_p < 1.0:
        # top-k keeps from its last bin at least what is missing to k.
        least = tl.where((j == last) & (top_k > 0), top_k - before, counts)
        upper = tl.where(j <= last, counts, 0).to(tl.float32) * tl.exp(-_distance(j))
        lower = tl.where(j <= last, least, 0).to(tl.float32) * tl.exp(-_distance(j + 1))
        upper_sum, lower_sum = tl.sum(upper, 0), tl.sum(lower, 0)
        # A bin cannot hold the threshold if all up to it is too light, or all after it too heavy.
        too_light = tl.cumsum(upper, 0) * _SLACK < top_p * lower_sum
        later = tl.cumsum(lower, 0, reverse=True) - lower
        too_heavy = later > ((1.0 - top_p) * _SLACK + _NOISE) * upper_sum
        first = tl.sum((too_light | too_heavy).to(tl.int32), 0)
        if top_k == 0:
            enough = tl.cumsum(lower, 0) >= top_p * upper_sum * _SLACK
            later = tl.cumsum(upper, 0, reverse=True) - upper
            little = later * _SLACK <= (1.0 - top_p - _NOISE) * lower_sum
            last = tl.minimum(tl.sum((enough | little).to(tl.int32) ^ 1, 0), BINS - 1)
    return first, last, tl.sum(tl.where(j < first, counts, 0), 0)


@jit_kernel(do_not_specialize_on_alignment=["top_p_ptr"])
def _count_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, maxima_ptr, tally_ptr, top_k_ptr, top_p_ptr, V, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):
    b, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    top_k, top_p = _limits(top_k_ptr, top_p_ptr, b)
    if (top_k == 0) & (top_p == 1.0):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + b * V + ids, mask=ids < V, other=0.0)
    counts = tl.histogram(_bin(x, _largest(maxima_ptr, b, blocks, BLOCK_S)), BINS, mask=ids < V)
    tl.atomic_add(tally_ptr + b * TALLY + tl.arange(0, BINS), counts.to(tl.int64), mask=counts > 0)


@jit_kernel(do_not_specialize_on_alignment=["top_p_ptr"])
def _collect_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, maxima_ptr, tally_ptr, list_ptr, top_k_ptr, top_p_ptr, V, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):
    b, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    top_k, top_p = _limits(top_k_ptr, top_p_ptr, b)
    if (top_k == 0) & (top_p == 1.0):
        return
    first, last, _ = _undecided(tally_ptr, b, top_k, top_p)
    largest = _largest(maxima_ptr, b, blocks, BLOCK_S)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + b * V + ids, mask=ids < V, other=float("-inf"))
    index = _bin(x, largest)
    inside = ((index >= first) & (index <= last) & (ids < V)).to(tl.int32)
    row = tally_ptr + b * TALLY
    found = tl.sum(inside, 0)
    if found > 0:
        place = tl.atomic_add(row + _COLLECTED, found.to(tl.int64)) + tl.cumsum(inside, 0) - 1
        tl.store(list_ptr + b * V + place, x, mask=inside == 1)
    if top_p < 1.0:
        mass = _mass(x, largest)
        tl.atomic_add(row + _MASS_BEFORE, tl.sum(tl.where(index < first, mass, 0), 0))
        tl.atomic_add(row + _MASS, tl.sum(mass, 0))


@triton.jit
def _bisect(list_ptr, n, low, high, wanted, largest, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest key with at least `wanted` entries (MASS: mass) at or above it. `low` satisfies
    that and `high` does not.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        total = tl.zeros([BLOCK], tl.int64)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        below = tl.full([BLOCK], _LOWEST, tl.int32)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(list_ptr + i, mask=i < n, other=float("-inf"))
            key = _key(x)
            inside = (key >= middle) & (i < n)
            weight = tl.full([BLOCK], 1, tl.int64)
            if MASS:
                weight = _mass(x, largest)
            total += tl.where(inside, weight, 0)
            above = tl.where(inside, tl.minimum(above, key), above)
            below = tl.where((key < middle) & (i < n), tl.maximum(below, key), below)
        if tl.sum(total, 0) >= wanted:
            low = tl.min(above, 0).to(tl.int64)
        else:
            high = tl.max(below, 0).to(tl.int64) + 1
    return low


@triton.jit
def _mass_from(list_ptr, n, low, largest, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(list_ptr + i, mask=i < n, other=float("-inf"))
        total += tl.where(_key(x) >= low, _mass(x, largest), 0)
    return tl.sum(total, 0)


@jit_kernel(do_not_specialize_on_alignment=["top_p_ptr", "min_p_ptr"])
def _threshold_kernel(  # type: ignore[no-untyped-def]
    maxima_ptr, tally_ptr, list_ptr, threshold_ptr, top_k_ptr, top_p_ptr, min_p_ptr, V, blocks,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid [rows]: the lowest logit that a row keeps."""
    b = tl.program_id(0).to(tl.int64)
    largest = _largest(maxima_ptr, b, blocks, BLOCK_S)
    low = tl.full([], _LOWEST, tl.int64)
    if (top_k_ptr is not None) | (top_p_ptr is not None):
        top_k, top_p = _limits(top_k_ptr, top_p_ptr, b)
        if (top_k > 0) | (top_p < 1.0):
            row, entries = tally_ptr + b * TALLY, list_ptr + b * V
            n = tl.load(row + _COLLECTED).to(tl.int32)
            _, _, before = _undecided(tally_ptr, b, top_k, top_p)
            high = _key(largest).to(tl.int64) + 1
            if top_k > 0:
                low = _bisect(entries, n, low, high, top_k - before, largest, False, BLOCK)
            if top_p < 1.0:
                mass, mass_before = tl.load(row + _MASS), tl.load(row + _MASS_BEFORE)
                if top_k > 0:
                    mass = mass_before + _mass_from(entries, n, low, largest, BLOCK)
                wanted = tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
                low = _bisect(entries, n, low, high, wanted - mass_before, largest, True, BLOCK)
    lowest = low.to(tl.int32)
    threshold = _in_order(lowest).to(tl.float32, bitcast=True)
    threshold = tl.where(lowest == _LOWEST, float("-inf"), threshold)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b)
        if min_p > 0:
            threshold = tl.maximum(threshold, largest + tl.log(min_p))
    tl.store(threshold_ptr + b, threshold)


def thresholds(
    logits: Tensor, maxima: Tensor, block: int, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """The lowest logit that each row keeps, `[B]` float32, in three launches; one for min-p alone.

    Args:
        logits: `[B, V]` float32 contiguous, penalised and tempered.
        maxima: `[B, ceil(V / block)]` float32, the largest of each `block` entries.
        top_k, top_p, min_p: `[B]` as in `filtered_logits`.
    """
    batch, vocabulary = logits.shape
    threshold = torch.empty(batch, dtype=torch.float32, device=logits.device)
    blocks = maxima.shape[1]
    block_s = next_power_of_2(blocks)
    tally = entries = None
    if top_k is not None or top_p is not None:
        tally = torch.zeros((batch, TALLY.value), dtype=torch.int64, device=logits.device)
        entries = torch.empty_like(logits)
        grid, sizes = (batch, blocks), {"BLOCK": block, "BLOCK_S": block_s, "num_warps": 8}
        _count_kernel[grid](logits, maxima, tally, top_k, top_p, vocabulary, **sizes)
        _collect_kernel[grid](logits, maxima, tally, entries, top_k, top_p, vocabulary, **sizes)
    _threshold_kernel[(batch,)](
        maxima, tally, entries, threshold, top_k, top_p, min_p, vocabulary, blocks,
        BLOCK=LIST_BLOCK, BLOCK_S=block_s, num_warps=4,
    )  # fmt: skip
    return threshold
