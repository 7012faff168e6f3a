"""The softmax-attention layer: what a backend reads of a layer, and a plain layer with projections."""

import torch
from torch import nn

from hybridrt.config import AttentionConfig, ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget


class AttentionLayer:
    """Attention of one layer on one rank, as `backend.forward(q, k, v, layer, batch)` takes its layer; keys and values
    live in the backend's KV pool, under `layer_id`. Ranks share KV heads where there are fewer heads than ranks.

    Raises:
        ConfigError: the heads or the KV heads cannot be split over the ranks.
    """

    def __init__(self, config: AttentionConfig, layer_id: int, tp: TPGroup) -> None:
        self.layer_id = layer_id
        self.num_heads = tp.divide("attention heads", config.num_heads)
        self.num_kv_heads = tp.divide("KV heads", config.num_kv_heads, min(config.num_kv_heads, tp.size))
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_window
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim


def qkv_segments(config: AttentionConfig, tp: TPGroup, q_multiple: int = 1) -> list[Segment]:
    """Output segments q, k, v of a merged projection; KV heads are shared by ranks where there are fewer."""
    kv_shards = min(config.num_kv_heads, tp.size)
    kv_size = config.num_kv_heads * config.head_dim
    q_size = config.num_heads * config.head_dim * q_multiple
    return [Segment("q", q_size), Segment("k", kv_size, kv_shards), Segment("v", kv_size, kv_shards)]


class PlainAttention(nn.Module):
    """Grouped-query attention without rotary and without biases, its projections included (Nemotron-H, Jamba)."""

    def __init__(self, config: ModelConfig, layer_id: int, name: str, build: Build) -> None:
        super().__init__()
        attention, hidden = config.attention, config.hidden_size
        self.attn = AttentionLayer(attention, layer_id, build.tp)
        self.qkv = ColumnLinear(f"{name}.qkv", hidden, qkv_segments(attention, build.tp), build=build)
        width = attention.num_heads * attention.head_dim
        self.o_proj = RowLinear(f"{name}.o_proj", [Segment("x", width)], hidden, build=build)

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        """Attention over norm(x + residual), and x + residual."""
        projected, residual = norm_linear(norm, self.qkv, x, residual)
        q, k, v = projected.split((self.attn.q_size, self.attn.kv_size, self.attn.kv_size), dim=-1)
        return self.o_proj.onto(residual, batch.attn_backend.forward(q, k, v, self.attn, batch))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets of the four projections under `key`."""
        found = self.o_proj.targets(f"{key}.o_proj", "x")
        for name in ("q", "k", "v"):
            found |= self.qkv.targets(f"{key}.{name}_proj", [name])
        return found
