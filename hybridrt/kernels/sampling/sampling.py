"""From logits to tokens: penalties, temperature, filters, and Gumbel-max draws.

Shapes: B rows, V vocabulary entries. Order: bitmask, penalties, temperature, top-k, top-p, min-p.
Filters keep entries that tie with their threshold.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation

# SplitMix64's increment and finaliser (Steele, Lea and Flood 2014), as signed 64-bit integers.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)

MIN_TEMPERATURE = 1e-5  # rows below it are greedy: quotients may overflow float32
STREAM_TOKEN = 0  # other uses have higher numbers


@dataclass(frozen=True)
class Penalties:
    """Per row `[B]` float32 factors (off: repetition 1, others 0) and token counts.

    Attributes:
        repetition: divides positive and multiplies negative logits of tokens in prompt or output
            (Keskar et al. 2019, section 4.1).
        presence: subtracted from logits of tokens in the output.
        frequency: subtracted once per occurrence in the output.
        output_counts: `[B, V]` int32.
        prompt_mask: `[B, V]` bool.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    output_counts: Tensor
    prompt_mask: Tensor


class LogitFilters(NamedTuple):
    """Filters of the logits of B rows; a field is None if no row uses that filter.

    Attributes:
        temperature: `[B]` float32; rows below MIN_TEMPERATURE are greedy and not tempered.
        top_k: `[B]` int32, <= 0 is off.
        top_p: `[B]` float32, 1 is off: the smallest set of likeliest tokens with mass >= top_p
            (Holtzman et al. 2020).
        min_p: `[B]` float32, 0 is off: tokens of at least min_p times the best probability (Nguyen
            et al. 2024).
        bitmask: `[B, ceil(V / 32)]` int32, bit i % 32 of word i // 32 set if token i is allowed.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalties: Penalties | None = None
    bitmask: Tensor | None = None


def uniform(seed: Tensor, index: Tensor, stream: int, ids: Tensor) -> Tensor:
    """Uniform float32 in (0, 1), a pure function of (seed, index, stream, id): `[B, n]` for seed,
    index `[B]` int64, ids `[n]`.

    SplitMix64 seeded from (seed, index, stream), read at counter `id`. Values near 0 are
    fine-grained (to 2^-64).
    """
    key = _mix(_mix(seed + signed_64((stream + 1) * GOLDEN_GAMMA)) + index * GOLDEN_GAMMA)
    bits = _mix(key.unsqueeze(1) + (ids.long() + 1) * GOLDEN_GAMMA)
    # 63 bits, then the middle of their interval: never 0; the clamp undoes rounding to 1.
    return ((bits >> 1) & (2**63 - 1)).float().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)


@operation(By("triton"), By("flashinfer", priority=5))
def filtered_logits(logits: Tensor, filters: LogitFilters) -> Tensor:
    """`[B, V]` float32 logits, penalised, tempered, -inf where filtered out."""
    logits = only_allowed(logits.float(), filters.bitmask)
    if filters.penalties is not None:
        logits = _penalized(logits, filters.penalties)
    logits = logits / torch.where(filters.temperature < MIN_TEMPERATURE, 1.0, filters.temperature).unsqueeze(1)
    if filters.top_k is not None or filters.top_p is not None:
        logits = _top_k_top_p(logits, filters.top_k, filters.top_p)
    if filters.min_p is not None:
        logits = logits.masked_fill(logits < (logits.amax(-1) + filters.min_p.log()).unsqueeze(1), -torch.inf)
    return logits


@operation(By("triton"), By("flashinfer", priority=5))
def sample(logits: Tensor, filters: LogitFilters, seeds: Tensor, indices: Tensor) -> Tensor:
    """One token per row, `[B]` int64: drawn from softmax(filtered_logits), or the argmax in greedy
    rows. -1 if logits are not finite.

    Draws are keyed by seeds, indices `[B]` int64 (request seed, output position), so batching and
    overlap do not change them.
    """
    # Gumbel-max: argmax(logit - log(e)) for exponential e.
    logits = filtered_logits.reference(logits, filters)
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = torch.log1p(uniform(seeds, indices, STREAM_TOKEN, ids).neg_()).neg_().log_()
    return _best(logits - noise.masked_fill_((filters.temperature < MIN_TEMPERATURE).unsqueeze(1), 0))


@operation(By("triton"))
def greedy(logits: Tensor, bitmask: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The most likely allowed token of each row, `[B]` int64; the first of equal ones. -1 if an
    allowed logit is NaN or infinity, or all are -infinity. `out` gets the result, if given."""
    best = _best(logits if bitmask is None else only_allowed(logits, bitmask))
    return best if out is None else out.copy_(best)


@operation()
def token_logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax(logits) at tokens `[B, k]` int64, and of the top_n best. Undefined for a token -1.

    Returns (logprobs `[B, k]` float32, top_ids `[B, top_n]` int64, top_logprobs `[B, top_n]` float32).
    """
    logits = logits.float()
    log_total = logits.logsumexp(-1, keepdim=True)
    top_logits, top_ids = logits.topk(top_n, -1)
    return logits.gather(1, tokens.clamp(min=0)) - log_total, top_ids, top_logits - log_total


def signed_64(value: int) -> int:
    """value mod 2^64 as a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _best(logits: Tensor) -> Tensor:
    largest, tokens = logits.max(-1)
    return tokens.masked_fill_(~largest.isfinite(), -1)


def only_allowed(logits: Tensor, bitmask: Tensor | None) -> Tensor:
    """Logits [B, V], -inf for tokens that the bitmask [B, ceil(V / 32)] forbids."""
    if bitmask is None:
        return logits
    bits = (bitmask.unsqueeze(-1) >> torch.arange(32, device=bitmask.device, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def _penalized(logits: Tensor, penalties: Penalties) -> Tensor:
    in_output = penalties.output_counts > 0
    factor = penalties.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_output | penalties.prompt_mask, repeated, logits)
    logits = logits - penalties.frequency.unsqueeze(1) * penalties.output_counts
    return logits - penalties.presence.unsqueeze(1) * in_output


def _top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    vocabulary = logits.shape[1]
    ranked = logits.sort(-1, descending=True).values
    if top_k is not None:
        last = torch.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k).long() - 1
        threshold = ranked.gather(1, last.unsqueeze(1))
        ranked = ranked.masked_fill(ranked < threshold, -torch.inf)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p is not None:
        probabilities = ranked.softmax(-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        dropped = (mass_before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
        dropped[:, 0] = False
        threshold = ranked.masked_fill(dropped, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits
