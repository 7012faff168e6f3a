"""Decode steps over SGLang's states and rings, around its `TritonGDNKernel.packed_decode`.

SGLang owns all memory: with `--enable-linear-replayssm` each state slot has a ring of L columns with corrected values,
normalised keys and log decays, and a cursor that SGLang moves. Those are the entries of hybridrt's rings, too, so a
step may be computed by either.

B rows, N slots, Hk key heads of dim K, Hv value heads of dim V.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.core.records import FusedStep, GateWeights, StateRing, StateSlots
from hybridrt.kernels.core.slots import PADDING_SLOT
from hybridrt.kernels.delta_rule.decode import gdn_decode
from hybridrt.kernels.state.state_ring import RingFolds, fold_ring

logger = logging.getLogger("sglang.srt.hybridrt")  # below SGLang's own, whose level and handler it has
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RING = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos")


def packed_decode(
    original: Callable[..., Tensor], kernel: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **terms: Any
) -> Tensor:
    """An AROUND hook: one token of each row, [1, B, Hv, V] in mixed_qkv's dtype.

    Args:
        mixed_qkv: [B, C] after conv and SiLU; a, b: [B, Hv].
        terms: those of `original`: `A_log`, `dt_bias`, `ssm_states` [N, Hv, V, K], `cache_indices` [B] (-1 is padding),
            and with a ring `replayssm_d` [N, Hv, L, V], `replayssm_k` [N, Hk, L, K], `replayssm_g` [N, Hv, L],
            `replayssm_write_pos` [B], `replayssm_force_flush` [B] or None.
    """
    if reason := reason_against(mixed_qkv, terms):
        _log_once(reason)
        return original(kernel, mixed_qkv, a, b, **terms)
    return replay_decode(mixed_qkv, a, b, terms)


def reason_against(mixed_qkv: Tensor, terms: dict[str, Any]) -> str | None:
    """Why SGLang's own kernel runs, with what to change; None if hybridrt's does."""
    states = terms["ssm_states"]
    inner = states.shape[1:]
    packed = states.stride()[1:] == (inner[1] * inner[2], inner[2], 1)
    scale = inner[2] ** -0.5
    rules: tuple[tuple[bool, str], ...] = (
        (any(terms.get(name) is None for name in RING), "states have no rings: start with --enable-linear-replayssm"),
        (states.dtype not in STATE_DTYPES, f"states are {states.dtype}"),
        (not packed or mixed_qkv.stride(-1) != 1, "states or inputs are not contiguous"),
        (abs(terms["scale"] - scale) > 1e-6 * scale, f"queries are scaled by {terms['scale']}, not by {scale}"),
    )
    return next((text for applies, text in rules if applies), None)


@cache
def _log_once(reason: str) -> None:
    logger.warning("hybridrt: SGLang's own decode of Gated Delta Nets runs, because %s", reason)


def replay_decode(mixed_qkv: Tensor, a: Tensor, b: Tensor, terms: dict[str, Any]) -> Tensor:
    """The step by hybridrt's kernels: new entries join the rings, and those that are full or forced are folded.

    A kernel of the step reads `rows` and `oldest` without waiting for the last kernel that was launched before it. So
    `folds`, which it does not read, is made in between.
    """
    states, slots = terms["ssm_states"], terms["cache_indices"]
    values, keys, gates, written = (terms[name] for name in RING)
    rows, oldest = slots.clamp(min=0), torch.zeros_like(slots)
    folds = _folds(slots, rows, oldest, written, terms.get("replayssm_force_flush"), gates.shape[2])
    inputs, ring = mixed_qkv.unsqueeze(1), StateRing(values, keys, gates, rows, oldest, written)
    step = FusedStep.after_conv(inputs, StateSlots(states, slots, slots), ring)
    weights = GateWeights(terms["A_log"], terms["dt_bias"])
    out = gdn_decode(inputs, a.unsqueeze(1), b.unsqueeze(1), weights=weights, step=step)
    fold_ring(states[None], values[None], keys[None], gates[None], None, folds)
    return out.transpose(0, 1)


def _folds(
    slots: Tensor, rows: Tensor, oldest: Tensor, written: Tensor, forced: Tensor | None, width: int
) -> RingFolds:
    """All rows, with PADDING_SLOT for those whose ring is neither full after the step nor `forced` [B]."""
    full = written == width - 1
    if forced is not None:
        full = full | (forced != 0)
    count = torch.full((1,), len(slots), dtype=torch.int32, device=slots.device)
    return RingFolds(slots.where(full, PADDING_SLOT), rows, oldest, written + 1, count)
