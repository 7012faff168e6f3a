"""The softmax-attention layer: a handle that routes to the batch's backend."""

import torch
from torch import nn

from hybridrt.attention.base import Rope
from hybridrt.config import AttentionConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.linear import Segment


class RadixAttention(nn.Module):
    """Attention of one layer on one rank; keys and values live in the backend's KV pool, under `layer_id`."""

    def __init__(self, config: AttentionConfig, layer_id: int, tp: TPGroup) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(config.num_kv_heads // tp.size, 1)
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.sliding_window
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, rope: Rope | None = None
    ) -> torch.Tensor:
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim]; returns q's shape."""
        return batch.attn_backend.forward(q, k, v, self, batch, rope=rope)


def qkv_segments(config: AttentionConfig, tp: TPGroup, q_multiple: int = 1) -> list[Segment]:
    """Output segments q, k, v of a merged projection; KV heads are shared by ranks where there are fewer."""
    kv_shards = min(config.num_kv_heads, tp.size)
    kv_size = config.num_kv_heads * config.head_dim
    q_size = config.num_heads * config.head_dim * q_multiple
    return [Segment("q", q_size), Segment("k", kv_size, kv_shards), Segment("v", kv_size, kv_shards)]
