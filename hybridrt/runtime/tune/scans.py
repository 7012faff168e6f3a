"""Trials of prompts of recurrent layers: scans of Mamba-2, passes of the gated delta rule."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.records import DeltaInputs, Prompts, SSMInputs, SSMWeights, StateSlots
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule
from hybridrt.kernels.delta_rule.delta_rule_triton import Pass, chunk_gated_delta_rule_triton
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.mamba.mamba2_scan_triton import Scan, mamba2_chunk_scan_triton
from hybridrt.runtime.tune.trial import Trial, normal

TOKENS = 8192  # of all rows of a pass together, at most
ROW_TOKENS = 64, 2048  # bounds of one row of a pass


def mamba2_scan(shape: Scan, device: torch.device) -> Trial:
    """One prompt after a state."""
    draw = partial(normal, device, dtype=shape.dtype)
    x = draw(shape.tokens, shape.heads, shape.dim)
    B, C = (draw(shape.tokens, shape.groups, shape.state_dim, seed=seed) for seed in (1, 2))
    inputs = SSMInputs(x, draw(shape.tokens, shape.heads, seed=3), B, C)
    numbers = partial(normal, device, shape.heads, dtype=torch.float32)
    weights = SSMWeights(-numbers(seed=4).exp(), numbers(seed=5), numbers(seed=6) - 3.0)
    state = _slots(1, (shape.heads, shape.dim, shape.state_dim), device)
    prompts = _prompts(1, shape.tokens, shape.chunk_size, device)
    given = inputs, weights, state, prompts
    exact = (_exact(inputs), weights, _slots(1, (shape.heads, shape.dim, shape.state_dim), device), prompts)
    return Trial(
        [partial(mamba2_chunk_scan_triton, *given)],
        lambda: _with_state(mamba2_chunk_scan_triton(*given), state),
        lambda: _with_state(mamba2_chunk_scan.reference(*exact), exact[2]),
    )


def delta_pass(shape: Pass, device: torch.device) -> Trial:
    """Prompts of as many rows, after their states."""
    least, most = ROW_TOKENS
    length = max(least, min(TOKENS // shape.rows, most))
    tokens, draw = shape.rows * length, partial(normal, device, dtype=shape.dtype)
    q, k = (draw(tokens, shape.key_heads, shape.key_dim, seed=seed) for seed in (0, 1))
    channels = (shape.key_dim,) if shape.by_channel else ()
    g = -normal(device, tokens, shape.value_heads, *channels, dtype=torch.float32, seed=3).abs() * 0.1
    beta = torch.sigmoid(normal(device, tokens, shape.value_heads, dtype=torch.float32, seed=4))
    inputs = DeltaInputs(q, k, draw(tokens, shape.value_heads, shape.value_dim, seed=2), g, beta)
    size = shape.value_heads, shape.value_dim, shape.key_dim
    state, exact_state = (_slots(shape.rows, size, device) for _ in range(2))
    prompts = _prompts(shape.rows, length, shape.size, device)
    return Trial(
        [partial(chunk_gated_delta_rule_triton, inputs, state, prompts)],
        lambda: _with_state(chunk_gated_delta_rule_triton(inputs, state, prompts), state),
        lambda: _with_state(chunk_gated_delta_rule.reference(_exact(inputs), exact_state, prompts), exact_state),
    )


def _exact(inputs: Any) -> Any:
    """The same numbers in float32."""
    return type(inputs)(*(None if t is None else t.float() for t in inputs))


def _slots(rows: int, size: tuple[int, int, int], device: torch.device) -> StateSlots:
    """Random states in slots that no step writes."""
    read = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    return StateSlots(normal(device, 2 * rows + 1, *size, dtype=torch.float32, seed=9), read, read + rows)


def _prompts(rows: int, length: int, chunk_size: int, device: torch.device) -> Prompts:
    plan = plan_chunks([chunk_size] * rows, [length] * rows, chunk_size, device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * length
    return Prompts(starts, torch.ones(rows, dtype=torch.bool, device=device), plan)


def _with_state(out: Tensor, state: StateSlots) -> list[Tensor]:
    return [out.clone(), state.states[state.write_state_slots.long()].clone()]
