"""Prints what the Mamba-1 kernels use on sm_90 for Falcon-Mamba-7B (8192 channels of 16 states), one JSON object a
line."""

import json
from dataclasses import asdict
from typing import Any

import torch

from hybridrt.kernels.chunk_plan import ChunkPlan
from hybridrt.kernels.mamba1_update import BCNorms
from hybridrt.kernels.mamba1_update_triton import mamba1_update_triton
from hybridrt.kernels.selective_scan_triton import selective_scan_triton
from tests.support.sm90 import compiled_only
from tests.support.sm90_mamba2 import int32, meta

CHANNELS, STATES, RANK = 8192, 16, 256


def inputs(*leading: int) -> dict[str, Any]:
    """bfloat16 activations as the projections leave them: halves of one, and slices of another."""
    x, z = meta(*leading, 2 * CHANNELS).chunk(2, -1)
    _, B, C = meta(*leading, RANK + 2 * STATES).split((RANK, STATES, STATES), -1)
    rates, D = meta(CHANNELS, STATES, dtype=torch.float32), meta(CHANNELS, dtype=torch.float32)
    return {"x": x, "dt": meta(*leading, CHANNELS), "A": rates, "B": B, "C": C, "D": D, "dt_bias": D, "z": z}


def step(batch: int, tokens: int, state: torch.dtype, tree: bool = False) -> None:
    slots, states = int32(batch), meta(300, CHANNELS, STATES, dtype=state)
    weight = meta(STATES, dtype=torch.float32)
    stored = meta(129, tokens, CHANNELS, STATES, dtype=state) if tokens > 1 else None
    mamba1_update_triton(
        states, **inputs(batch, tokens), read_slots=slots, write_slots=slots, intermediate_states=stored, rows=slots,
        parents=int32(batch, tokens) if tree else None, norms=BCNorms(weight, weight, 1e-6),
    )  # fmt: skip


def prefill(tokens: int, chunk_size: int, state: torch.dtype) -> None:
    chunks = tokens // chunk_size
    plan = ChunkPlan(int32(chunks + 1), int32(chunks), int32(1), int32(1), chunks, chunk_size, tokens, (tokens,))
    selective_scan_triton(
        **inputs(tokens), states=meta(300, CHANNELS, STATES, dtype=state), read_slots=int32(1), write_slots=int32(1),
        has_initial_state=meta(1, dtype=torch.bool), query_start_loc=int32(2), plan=plan,
    )  # fmt: skip


def main() -> None:
    for state in (torch.bfloat16, torch.float32):
        with compiled_only() as used:
            step(128, 1, state)
            step(32, 5, state)
            step(32, 5, state, tree=True)
            prefill(8192, 64, state)
        for usage in used:
            print(json.dumps({"state": str(state), **asdict(usage)}), flush=True)


if __name__ == "__main__":
    main()
