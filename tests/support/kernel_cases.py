"""Calls of the operations of recurrent layers at the shapes of a model, in bfloat16, over pools full of NaN.

Tests and benchmarks share them: they differ in the rows that they ask for. Tensors are made on torch's default device.
Arguments are given one by one (`tests/support/flat.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import mamba1_of, mamba2_of
from hybridrt.base.model_config import ModelConfig
from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.delta_rule.decode import split_qkv
from hybridrt.kernels.mamba.mamba2_scan import split_conv_channels
from hybridrt.kernels.state.state_ring import RingFolds
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import linear_kind, state_shape
from hybridrt.mem_cache.pools.mamba_pool_spec import ring_width
from hybridrt.recurrent.lightning import decay_rates

SLOTS, ROWS = 31, 30  # entries of the pools, scratch apart
BATCH, PADDING = 18, 2


@dataclass
class Case:
    """One call of an operation.

    Attributes:
        args: arguments by name.
        pools: arguments that the call may write, and the entries of their first dimension that it may change.
        consumed: arguments that the call may overwrite with anything.
        exact: rounding does not tell the reference from the kernel: the results must be the same numbers.
        decode: runs in decode steps.
    """

    op: str
    args: dict[str, Any]
    pools: dict[str, list[int]] = field(default_factory=dict)
    consumed: tuple[str, ...] = ()
    exact: bool = False
    decode: bool = True


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@dataclass
class DecodeRows:
    """Rows of a decode or verify step with their pools: each has its own slot and ring row.

    Attributes:
        tokens: of a row.
        batch, padding: rows, and how many of them, the last, are padding.
        num_slots, num_rows: entries of the pools, scratch apart.
        position: of each row's first token; None for random ones.
    """

    shape: StateShape
    tokens: int
    batch: int = BATCH
    padding: int = PADDING
    num_slots: int = SLOTS
    num_rows: int = ROWS
    state_dtype: torch.dtype = torch.float32
    position: int | None = None

    def __post_init__(self) -> None:
        real = self.batch - self.padding
        self.used_slots = torch.randperm(self.num_slots)[:real].add(1).tolist()
        self.used_rows = torch.randperm(self.num_rows)[:real].add(1).tolist()
        self.slots = int32([*self.used_slots, *[-1] * self.padding])
        self.rows = int32([*self.used_rows, *[0] * self.padding])
        positions = torch.randint(0, 3000, (real,)).tolist() if self.position is None else [self.position] * real
        self.positions = int32([*positions, *[0] * self.padding])

    def slot_args(self) -> dict[str, Tensor]:
        return {"read_state_slots": self.slots, "write_state_slots": self.slots}

    def tokenwise(self, *widths: int) -> list[Tensor]:
        """Slices [B, T, width] of one merged projection; padding rows are NaN."""
        merged = normal(self.batch, self.tokens, sum(widths))
        merged[self.batch - self.padding :] = torch.nan
        return list(merged.split(widths, -1))

    def conv(self) -> Tensor:
        pool = poisoned(
            self.num_slots + 1, self.shape.conv_dim, self.shape.conv_width(self.tokens), dtype=torch.bfloat16
        )
        pool[self.used_slots] = normal(len(self.used_slots), *pool.shape[1:])
        width = pool.shape[2]
        for slot, position in zip(self.used_slots, self.positions.tolist()):
            for before in range(position - width, 0):  # a slot begins as zeros
                pool[slot, :, before % width] = 0
        return pool

    def states(self) -> Tensor:
        pool = poisoned(self.num_slots + 1, *self.shape.temporal, dtype=self.state_dtype)
        pool[self.used_slots] = normal(len(self.used_slots), *self.shape.temporal, dtype=self.state_dtype)
        return pool

    def ring(self, gate: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """A state ring with entries where the cursors say so, some rows about to fold; gates are gate(normal)."""
        heads, values, keys = self.shape.temporal
        width, ring_shapes = ring_width(self.tokens), linear_kind(self.shape.kind).ring_shapes
        assert ring_shapes is not None
        pools = {
            "values": poisoned(self.num_rows + 1, heads, width, values, dtype=torch.bfloat16),
            "keys": poisoned(self.num_rows + 1, self.shape.groups, width, keys, dtype=torch.bfloat16),
            "gates": poisoned(self.num_rows + 1, *ring_shapes(self.shape, width)["ring_gates"]),
        }
        start = torch.randint(0, width, (self.batch,)).tolist()
        length = [i % (width - self.tokens + 1) for i in range(width, width - self.batch, -1)]
        for row, first, count in zip(self.used_rows, start, length):
            for column in [(first + i) % width for i in range(count)]:
                for name in ("values", "keys"):
                    pools[name][row, :, column] = normal(*pools[name].shape[1::2], scale=0.2)
                new = normal(heads, *pools["gates"].shape[3:], dtype=torch.float32)
                pools["gates"][row, :, column] = gate(new)
        return pools | {"start": int32(start), "length": int32(length)}

    def state_args(self, mode: str, gate: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], dict[str, list[int]]]:
        """Arguments of a state mode, and what a call may then write."""
        args: dict[str, Any] = {"states": self.states(), "rows": self.rows}
        if mode == "replay":
            of_rows = dict.fromkeys(("values", "keys", "gates"), self.used_rows)
            return args | self.ring(gate), {"states": []} | of_rows
        if mode in ("intermediate", "tree"):
            stored = poisoned(self.num_rows + 1, self.tokens, *self.shape.temporal, dtype=self.state_dtype)
            args, pools = args | {"stored": stored}, {"stored": self.used_rows, "states": []}
            if mode == "intermediate":
                return args, pools
            shape = self.num_rows + 1, self.tokens, self.shape.conv_dim, self.shape.conv_kernel - 1
            args |= {"windows": poisoned(*shape, dtype=torch.bfloat16), "predecessors": self.parents()}
            return args, pools | {"windows": self.used_rows}
        return args, {"states": self.used_slots}

    def parents(self) -> Tensor:
        """A draft tree: each node under the one before the last."""
        return int32([[max(t - 2, -1) for t in range(self.tokens)]] * self.batch)


def time_step_gate(x: Tensor) -> Tensor:
    """Time steps of 0.001 to 0.1."""
    return (x * 0.8 - 4.5).exp()


def log_decay_gate(x: Tensor) -> Tensor:
    return -time_step_gate(x)


def mamba2_heads(config: ModelConfig) -> dict[str, Any]:
    """Per-head numbers: decays from 0.999 to 0.2 a token."""
    heads = mamba2_of(config).num_heads
    return {
        "A": -torch.linspace(1.0, 16.0, heads),
        "D": normal(heads, dtype=torch.float32),
        "dt_bias": torch.linspace(-6.9, -2.3, heads),
        "dt_limit": mamba2_of(config).dt_limit,
    }


def conv_weights(shape: StateShape) -> dict[str, Tensor]:
    return {"weight": normal(shape.conv_dim, shape.conv_kernel, scale=0.5), "bias": normal(shape.conv_dim, scale=0.5)}


def mamba2_decode(config: ModelConfig, rows: DecodeRows, mode: str) -> Case:
    shape, (heads, dim, _) = rows.shape, rows.shape.temporal
    z, xBC, dt = rows.tokenwise(heads * dim, shape.conv_dim, heads)
    args, pools = rows.state_args(mode, time_step_gate)
    args |= {
        "xBC": xBC, "dt": dt, "z": z.unflatten(-1, (heads, dim)), "conv": rows.conv(), **rows.slot_args(),
        "start_positions": rows.positions,
    }  # fmt: skip
    return Case("mamba2_decode", args | mamba2_heads(config) | conv_weights(shape), pools | {"conv": rows.used_slots})


def after_conv(config: ModelConfig, rows: DecodeRows) -> dict[str, Any]:
    shape = rows.shape
    heads, dim, _ = shape.temporal
    z, xBC, dt = rows.tokenwise(heads * dim, shape.conv_dim, heads)
    x, B, C = split_conv_channels(xBC, (1, *shape.temporal))
    return {"x": x, "dt": dt, "B": B, "C": C, "z": z.unflatten(-1, (heads, dim))} | mamba2_heads(config)


def lightning_heads(heads: int) -> dict[str, Any]:
    """Per-head numbers: the decays of lightning attention, and time steps of one."""
    return {"A": -decay_rates(heads).to(torch.get_default_device()), "dt_limit": (1.0, 1.0)}


def lightning_decode(rows: DecodeRows, mode: str) -> Case:
    """`mamba2_decode` without a conv, with a group for each head."""
    heads, dim, _ = rows.shape.temporal
    xBC, _ = rows.tokenwise(3 * heads * dim, heads * dim)
    args, pools = rows.state_args(mode, torch.ones_like)
    args |= lightning_heads(heads) | rows.slot_args() | {
        "xBC": xBC, "dt": torch.zeros(heads).expand(*xBC.shape[:2], -1), "z": None, "bias": None,
        "weight": normal(3 * heads * dim, 0), "conv": rows.conv(), "start_positions": rows.positions,
    }  # fmt: skip
    return Case("mamba2_decode", args, pools)


def lightning_chunk_scan(prompts: "Prompts") -> Case:
    """`mamba2_chunk_scan` with a group for each head."""
    heads, dim, _ = prompts.shape.temporal
    x, B, C = (part.unflatten(-1, (heads, dim)) for part in prompts.tokenwise(*[heads * dim] * 3))
    args = {"x": x, "B": B, "C": C, "dt": torch.zeros(heads).expand(len(x), -1)} | lightning_heads(heads)
    return Case("mamba2_chunk_scan", args | prompts.scan_args(), {"states": prompts.used_slots}, decode=False)


def selective_state_update(config: ModelConfig, rows: DecodeRows, mode: str) -> Case:
    args, pools = rows.state_args(mode, time_step_gate)
    args |= after_conv(config, rows) | rows.slot_args()
    if mode == "intermediate":
        args["predecessors"] = rows.parents()
    return Case("selective_state_update", args, pools)


def mamba1_tokens(config: ModelConfig, tokenwise: Callable[..., list[Tensor]]) -> dict[str, Any]:
    """x and z are halves of one projection, B and C slices of another; rates from 1 to 16."""
    channels, states = state_shape(mamba1_of(config)).temporal
    x, z = tokenwise(channels, channels)
    _, B, C = tokenwise(mamba1_of(config).dt_rank, states, states)
    rates = -torch.arange(1.0, states + 1).expand(channels, -1).contiguous()
    return {
        "x": x, "z": z, "dt": tokenwise(channels)[0], "B": B, "C": C, "A": rates,
        "D": normal(channels, dtype=torch.float32), "dt_bias": torch.linspace(-6.9, -2.3, channels),
    }  # fmt: skip


def mamba1_update(config: ModelConfig, rows: DecodeRows, mode: str, tree: bool = False) -> Case:
    args, pools = rows.state_args(mode, time_step_gate)
    args |= mamba1_tokens(config, rows.tokenwise) | rows.slot_args()
    weights = torch.rand(2, mamba1_of(config).state_size) + 0.5
    args |= {"B_weight": weights[0], "C_weight": weights[1], "eps": 1e-6}
    if tree:
        args["predecessors"] = rows.parents()
    return Case("mamba1_update", args, pools)


def selective_scan(config: ModelConfig, prompts: "Prompts") -> Case:
    args = mamba1_tokens(config, prompts.tokenwise) | prompts.scan_args()
    return Case("selective_scan", args, {"states": prompts.used_slots}, decode=False)


def fold(rows: DecodeRows, gate: Callable[[Tensor], Tensor], A: Tensor | None) -> Case:
    """From each slot to itself or, of the first rows, to unused ones."""
    args, _ = rows.state_args("replay", gate)
    others = sorted({*range(1, rows.num_slots + 1)} - {*rows.used_slots})[:5]
    pools = {name: args[name][None] for name in ("states", "values", "keys", "gates")}
    written = int32([*others, *rows.used_slots[5:], *[-1] * rows.padding])
    folds = RingFolds(rows.slots, args["rows"], args["start"], args["length"], int32([rows.batch]), written)
    args = pools | {"A": None if A is None else A[None], "folds": folds}
    return Case("fold_ring", args, {"states": [0], "values": [], "keys": [], "gates": []})


@dataclass
class Prompts:
    """Chunks of several requests, packed: whole prompts, later chunks with a state before them, one single token.
    `spare` tokens follow the last row."""

    shape: StateShape
    chunk_size: int
    lengths: Sequence[int] = (700, 1, 515, 64, 130)
    computed: Sequence[int] = (0, 100, 77, 256, 0)
    num_slots: int = SLOTS
    spare: int = 3

    def __post_init__(self) -> None:
        self.used_slots = torch.randperm(self.num_slots)[: len(self.lengths)].add(1).tolist()
        self.slots = int32(self.used_slots)
        self.query_start_loc = int32([sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)])
        self.total = sum(self.lengths) + self.spare

    def slot_args(self) -> dict[str, Tensor]:
        return {"read_state_slots": self.slots, "write_state_slots": self.slots}

    def tokenwise(self, *widths: int) -> list[Tensor]:
        return list(normal(self.total, sum(widths)).split(widths, -1))

    def scan_args(self) -> dict[str, Any]:
        states = poisoned(self.num_slots + 1, *self.shape.temporal)
        later = [slot for slot, done in zip(self.used_slots, self.computed) if done]
        states[later] = normal(len(later), *self.shape.temporal, dtype=torch.float32)
        return {
            "states": states, **self.slot_args(),
            "has_initial_state": int32(self.computed) > 0, "query_start_loc": self.query_start_loc,
            "plan": plan_chunks(self.computed, self.lengths, self.chunk_size, torch.get_default_device()),
        }  # fmt: skip


def mamba2_chunk_scan(config: ModelConfig, prompts: Prompts) -> Case:
    shape, (heads, dim, _) = prompts.shape, prompts.shape.temporal
    z, xBC, dt = prompts.tokenwise(heads * dim, shape.conv_dim, heads)
    x, B, C = split_conv_channels(xBC, (1, *shape.temporal))
    args = {"x": x, "dt": dt, "B": B, "C": C, "z": z.unflatten(-1, (heads, dim))}
    args |= mamba2_heads(config) | prompts.scan_args()
    return Case("mamba2_chunk_scan", args, {"states": prompts.used_slots}, decode=False)


def causal_conv1d_varlen(prompts: Prompts) -> Case:
    shape = prompts.shape
    conv = poisoned(prompts.num_slots + 1, shape.conv_dim, shape.conv_width(1), dtype=torch.bfloat16)
    conv[prompts.used_slots] = normal(len(prompts.used_slots), *conv.shape[1:])
    x, _ = prompts.tokenwise(shape.conv_dim, 24)
    args = {
        "x": x, "conv": conv, **prompts.slot_args(),
        "query_start_loc": prompts.query_start_loc, "start_positions": int32(prompts.computed),
    }  # fmt: skip
    return Case("causal_conv1d_varlen", args | conv_weights(shape), {"conv": prompts.used_slots}, decode=False)


def causal_conv1d_update(rows: DecodeRows) -> Case:
    shape = rows.shape
    x, _ = rows.tokenwise(shape.conv_dim, 24)
    args = {
        "x": x, "conv": rows.conv(), **rows.slot_args(),
        "start_positions": rows.positions,
    }  # fmt: skip
    return Case("causal_conv1d_update", args | conv_weights(shape), {"conv": rows.used_slots})


def short_conv_update(rows: DecodeRows) -> Case:
    projected, _ = rows.tokenwise(3 * rows.shape.conv_dim, 24)
    args = {
        "x": projected, "conv": rows.conv(), **rows.slot_args(), "start_positions": rows.positions,
        "weight": conv_weights(rows.shape)["weight"], "bias": None, "activation": None,
    }  # fmt: skip
    return Case("short_conv_update", args, {"conv": rows.used_slots})


def gdn_decode(rows: DecodeRows, mode: str) -> Case:
    shape, heads = rows.shape, rows.shape.temporal[0]
    qkv, _, b, a = rows.tokenwise(shape.conv_dim, heads * shape.temporal[1], heads, heads)
    args, pools = rows.state_args(mode, log_decay_gate)
    args |= gdn_heads(heads) | {
        "qkv": qkv, "a": a, "b": b, "conv": rows.conv(), **rows.slot_args(),
        "start_positions": rows.positions,
    }  # fmt: skip
    return Case("gdn_decode", args | conv_weights(shape), pools | {"conv": rows.used_slots})


def gdn_after_conv(rows: DecodeRows) -> Case:
    """With a ring, of an engine that has a conv of its own (`FusedStep.after_conv`)."""
    case = gdn_decode(rows, "replay")
    channels = case.args["qkv"].shape[2]
    none = {"weight": case.args["weight"].new_empty(channels, 0), "bias": None, "activation": None}
    none |= {"conv": case.args["conv"].new_empty(1, channels, 1)}
    return Case("gdn_decode", case.args | none, {name: case.pools[name] for name in case.pools if name != "conv"})


def gdn_heads(heads: int) -> dict[str, Tensor]:
    return {"A_log": normal(heads, dtype=torch.float32) - 4, "dt_bias": normal(heads, dtype=torch.float32)}


def gdn_tokens(shape: StateShape, tokenwise: Callable[..., list[Tensor]]) -> dict[str, Tensor]:
    heads = shape.temporal[0]
    qkv, a, b = tokenwise(shape.conv_dim, heads, heads)
    q, k, v = split_qkv(qkv, torch.empty(1, *shape.temporal, device="meta"))
    return {"q": q, "k": k, "v": v, "g": a, "beta": b} | gdn_heads(heads)


def gdn_recurrent(rows: DecodeRows, mode: str) -> Case:
    args, pools = rows.state_args(mode, log_decay_gate)
    args |= gdn_tokens(rows.shape, rows.tokenwise)
    return Case("recurrent_gated_delta_rule", args | rows.slot_args(), pools)


def chunk_gated_delta_rule(prompts: Prompts) -> Case:
    args = gdn_tokens(prompts.shape, prompts.tokenwise) | prompts.scan_args()
    return Case("chunk_gated_delta_rule", args, {"states": prompts.used_slots}, decode=False)


def kda_weights(shape: StateShape) -> dict[str, Tensor]:
    """Decays from 0.999 to 0.2 a token, and a few that are stronger."""
    heads, _, keys = shape.temporal
    rates = torch.linspace(1.0, 16.0, heads).log()
    return {"A_log": rates, "dt_bias": normal(heads, keys, dtype=torch.float32) - 4.5}


def kda_tokens(shape: StateShape, tokenwise: Callable[..., list[Tensor]]) -> dict[str, Tensor]:
    """After the conv, with raw gates."""
    heads, _, keys = shape.temporal
    qkv, a, b = tokenwise(shape.conv_dim, heads * keys, heads)
    q, k, v = split_qkv(qkv, torch.empty(1, *shape.temporal, device="meta"))
    return {"q": q, "k": k, "v": v, "g": a.unflatten(-1, (heads, keys)), "beta": b} | kda_weights(shape)


def kda_decode(rows: DecodeRows, mode: str) -> Case:
    shape, (heads, _, keys) = rows.shape, rows.shape.temporal
    qkv, a, b = rows.tokenwise(shape.conv_dim, heads * keys, heads)
    args, pools = rows.state_args(mode, log_decay_gate)
    args |= {
        "qkv": qkv, "a": a.unflatten(-1, (heads, keys)), "b": b, "conv": rows.conv(), **rows.slot_args(),
        "start_positions": rows.positions, "weight": conv_weights(shape)["weight"], "bias": None,
    }  # fmt: skip
    return Case("gdn_decode", args | kda_weights(shape), pools | {"conv": rows.used_slots})


def kda_recurrent(rows: DecodeRows, mode: str) -> Case:
    args, pools = rows.state_args(mode, log_decay_gate)
    args |= kda_tokens(rows.shape, rows.tokenwise) | rows.slot_args()
    if mode == "intermediate":
        args["predecessors"] = rows.parents()
    return Case("recurrent_gated_delta_rule", args, pools)


def chunk_kda(prompts: Prompts, lower_bound: float | None = None) -> Case:
    args = kda_tokens(prompts.shape, prompts.tokenwise) | prompts.scan_args() | {"lower_bound": lower_bound}
    return Case("chunk_gated_delta_rule", args, {"states": prompts.used_slots}, decode=False)
