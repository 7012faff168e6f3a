"""Prints what the Mamba-2 kernels use on sm_90 for Falcon-H1-7B and Nemotron-H-8B, one JSON object a line."""

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.causal_conv1d_triton import causal_conv1d_update_triton, causal_conv1d_varlen_triton
from hybridrt.kernels.chunk_plan import ChunkPlan
from hybridrt.kernels.gated_norm_triton import gated_rms_norm_triton
from hybridrt.kernels.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba2_replay_decode_triton import replay_decode_triton
from hybridrt.kernels.mamba2_scan_triton import mamba2_chunk_scan_triton
from hybridrt.kernels.selective_state_update_triton import selective_state_update_triton
from hybridrt.kernels.state_ring import RingFolds
from hybridrt.kernels.state_ring_triton import advance_ring_triton, fold_ring_triton
from tests.support.sm90 import compiled_only

SHAPES = {"falcon-h1-7b": (24, 128, 256, 1), "nemotron-h-8b": (128, 64, 128, 8)}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def int32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


class Layer:
    """Tensors of one layer of bfloat16 activations, for `batch` rows of `tokens` tokens."""

    def __init__(self, shape: tuple[int, int, int, int], batch: int, tokens: int, state: torch.dtype) -> None:
        self.heads, self.dim, self.state_dim, self.groups = shape
        self.batch, self.tokens = batch, tokens
        width = self.heads * self.dim
        self.channels = width + 2 * self.groups * self.state_dim
        self.merged = meta(batch, tokens, width + self.channels + self.heads)
        z, self.xBC, dt = self.merged.split([width, self.channels, self.heads], -1)
        self.states = meta(300, self.heads, self.dim, self.state_dim, dtype=state)
        x, B, C = split_conv_channels(self.xBC, self.states.shape)
        self.inputs: dict[str, Any] = {"x": x, "dt": dt, "A": self.per_head(), "B": B, "C": C}
        self.terms: dict[str, Any] = {
            "D": self.per_head(), "dt_bias": self.per_head(), "dt_limit": (0.0, float("inf")),
            "z": z.unflatten(-1, (self.heads, self.dim)),
        }  # fmt: skip
        self.weight, self.bias, self.conv = meta(self.channels, 4), meta(self.channels), meta(300, self.channels, 8)

    def per_head(self) -> Tensor:
        return meta(self.heads, dtype=torch.float32)

    def step(self) -> None:
        """Classic decode for one token, verify with intermediate states for more, the conv included."""
        stored = meta(129, self.tokens, *self.states.shape[1:], dtype=self.states.dtype) if self.tokens > 1 else None
        rows = int32(self.batch)
        causal_conv1d_update_triton(self.xBC, self.weight, self.bias, self.conv, rows, rows, rows)
        selective_state_update_triton(
            self.states, **self.inputs, **self.terms, read_slots=rows, write_slots=rows,
            intermediate_states=stored, rows=rows,
        )  # fmt: skip

    def replay(self, width: int) -> None:
        values, keys = meta(129, self.heads, width, self.dim), meta(129, self.groups, width, self.state_dim)
        gates = meta(129, self.heads, width, dtype=torch.float32)
        rows: dict[str, Any] = {name: int32(self.batch) for name in ("rows", "start", "length")}
        terms = {name: part for name, part in self.terms.items() if name != "z"}
        replay_decode_triton(
            self.xBC, self.inputs["dt"], self.terms["z"], weight=self.weight, bias=self.bias, A=self.per_head(),
            conv=self.conv, states=self.states, values=values, keys=keys, gates=gates, slots=int32(self.batch),
            start_positions=int32(self.batch), **rows, **terms,
        )  # fmt: skip
        pool = (part[None] for part in (self.states, values, keys, gates, self.per_head()))
        slots = int32(self.batch)
        fold_ring_triton(*pool, RingFolds(slots, *rows.values(), count=int32(1)), write_slots=slots)
        advance_ring_triton(*rows.values(), slots, slots, width=width, widest=self.tokens)

    def prefill(self, chunk_size: int) -> None:
        chunks = self.tokens // chunk_size
        plan = ChunkPlan(
            int32(chunks + 1), int32(chunks), int32(1), int32(1), chunks, chunk_size, self.tokens, (self.tokens,)
        )
        inputs = {name: part if name == "A" else part[0] for name, part in self.inputs.items()}
        terms = {**self.terms, "z": self.terms["z"][0]}
        causal_conv1d_varlen_triton(
            self.xBC[0], self.weight, self.bias, self.conv, int32(1), int32(1), int32(2), int32(1)
        )
        mamba2_chunk_scan_triton(
            **inputs, **terms, states=self.states, read_slots=int32(1), write_slots=int32(1),
            has_initial_state=meta(1, dtype=torch.bool), query_start_loc=int32(2), plan=plan,
        )  # fmt: skip
        gate = self.terms["z"][0].flatten(1)
        weight = meta(gate.shape[1], dtype=torch.float32)
        gated_rms_norm_triton(gate, gate, weight, 1e-5, group_size=gate.shape[1] // self.groups, norm_before_gate=False)

    def tree(self) -> None:
        slots, tokens = int32(self.batch), (self.batch, self.tokens)
        causal_conv1d_update_triton(
            self.xBC, self.weight, self.bias, self.conv, slots, slots, slots,
            parents=int32(*tokens), windows=meta(129, self.tokens, self.channels, 3), rows=slots,
        )  # fmt: skip


def main() -> None:
    for name, shape in SHAPES.items():
        for state in (torch.bfloat16, torch.float32):
            with compiled_only() as used:
                Layer(shape, 128, 1, state).step()
                Layer(shape, 128, 1, state).replay(16)
                Layer(shape, 32, 5, state).step()
                Layer(shape, 32, 5, state).replay(32)
                if state == torch.bfloat16:
                    Layer(shape, 1, 8192, state).prefill(256)
                    Layer(shape, 32, 5, state).tree()
            for usage in used:
                print(json.dumps({"shape": name, "state": str(state), **asdict(usage)}), flush=True)


if __name__ == "__main__":
    main()
