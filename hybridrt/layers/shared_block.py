"""A transformer block with weights shared by several layers, and each layer's adapters (Zamba2)."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.attention.base import AttentionInputs
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig
from hybridrt.kernels.core.records import Rope
from hybridrt.layers.attention import AttentionLayer, qkv_segments
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap


class Adapter(nn.Module):
    """Low-rank matrices of a place, added to a shared projection.

    Args:
        matrices: checkpoint matrix -> its segments of the projection.
    """

    def __init__(self, name: str, size: int, rank: int, matrices: dict[str, list[Segment]], *, build: Build) -> None:
        super().__init__()
        # Every rank needs the low-rank vectors.
        self.down = ColumnLinear(f"{name}.down", size, [Segment(each, rank) for each in matrices], build=build.uncut)
        self.ups = nn.ModuleDict(
            {each: ColumnLinear(f"{name}.{each}", rank, parts, build=build) for each, parts in matrices.items()}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.down(x).chunk(len(self.ups), dim=-1)
        return torch.cat([up(part) for up, part in zip(self.ups.values(), low, strict=True)], dim=-1)

    def targets(self, key: str) -> CheckpointMap:
        """Targets under `key`, with {} for the matrix."""
        found: CheckpointMap = {}
        for each, up in self.ups.items():
            assert isinstance(up, ColumnLinear)
            found |= self.down.targets(f"{key.format(each)}.0", [each]) | up.targets(
                f"{key.format(each)}.1", list(up.segments)
            )
        return found


class SharedBlock(nn.Module):
    """Attention over x | embedding, then an MLP, without a residual. Several places share its
    weights; each has its own KV cache and adapters.

    Args:
        places: index of a place among those of all blocks -> layer id.
        attention_adapters: q, k and v have adapters too.
        bias: whether the MLP has one.
    """

    def __init__(
        self, name: str, attention: AttentionConfig, hidden: int, intermediate_size: int, places: dict[int, int], *,
        adapter_rank: int, attention_adapters: bool, bias: bool, eps: float, cos_sin: torch.Tensor | None, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rope = None if cos_sin is None else Rope(cos_sin)
        self.attn = {i: AttentionLayer(attention, layer_id, build) for i, layer_id in places.items()}
        inner, qkv = attention.num_heads * attention.head_dim, qkv_segments(attention, build.tp)
        gate_up = [Segment(part, intermediate_size) for part in ("gate", "up")]
        norm: dict[str, Any] = {"eps": eps, "device": build.device}
        self.norm, self.ff_norm = (
            RMSNorm(f"{name}.norm", 2 * hidden, **norm),
            RMSNorm(f"{name}.ff_norm", hidden, **norm),
        )
        self.qkv = ColumnLinear(f"{name}.qkv", 2 * hidden, qkv, build=build)
        self.o_proj = RowLinear(f"{name}.o_proj", [Segment("x", inner)], hidden, build=build)
        own = [replace(part, bias=bias) for part in gate_up]
        self.up = ColumnLinear(f"{name}.gate_up", hidden, own, build=build)
        down = [Segment("x", intermediate_size, bias=bias)]
        self.down = RowLinear(f"{name}.down", down, hidden, build=build)
        self.qkv_adapters, self.up_adapters = nn.ModuleDict(), nn.ModuleDict()
        for i in places:
            thin, each = adapter_rank, {part.name: [part] for part in qkv}
            if attention_adapters:
                self.qkv_adapters[str(i)] = Adapter(f"{name}.qkv.{i}", 2 * hidden, thin, each, build=build)
            self.up_adapters[str(i)] = Adapter(f"{name}.up.{i}", hidden, thin, {"gate_up": gate_up}, build=build)

    def forward(self, i: int, x: torch.Tensor, embedded: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """At hybrid layer `i`: [T, hidden] each to [T, hidden]."""
        attn, h = self.attn[i], self.norm(torch.cat((x, embedded), dim=-1))[0]
        projected = self.qkv(h)
        if self.qkv_adapters:
            projected += self.qkv_adapters[str(i)](h)
        q, k, v = projected.split(self.qkv.sizes, dim=-1)
        h = self.o_proj(batch.attn_backend.run(attn, batch, AttentionInputs(q, k, v, rope=self.rope)))
        h = self.ff_norm(h)[0]
        gate, up = self.up(h).add_(self.up_adapters[str(i)](h)).chunk(2, dim=-1)
        return self.down(F.gelu(gate).mul_(up))

    def targets(self, key: str) -> CheckpointMap:
        attention, mlp = f"{key}.self_attn", f"{key}.feed_forward"
        found = {
            **self.norm.targets(f"{key}.input_layernorm"),
            **self.ff_norm.targets(f"{key}.pre_ff_layernorm"),
            **self.o_proj.targets(f"{attention}.o_proj", "x"),
            **self.up.targets(f"{mlp}.gate_up_proj", ["gate", "up"]),
            **self.down.targets(f"{mlp}.down_proj", "x"),
        }
        for part in self.qkv.segments:
            found |= self.qkv.targets(f"{attention}.{part}_proj", [part])
        for adapters, below in (
            (self.qkv_adapters, f"{attention}.linear_{{}}_adapter_list"),
            (self.up_adapters, f"{mlp}.{{}}_proj_adapter_list"),
        ):
            for i, adapter in adapters.items():
                assert isinstance(adapter, Adapter)
                found |= adapter.targets(f"{below}.{i}")
        return found
