"""The softmax-attention layer: what the batch's backend must know of who asks."""

from hybridrt.config import AttentionConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.layers.linear import Segment


class RadixAttention:
    """Attention of one layer on one rank, as `backend.forward(q, k, v, layer, batch)` takes its layer; keys and values
    live in the backend's KV pool, under `layer_id`."""

    def __init__(self, config: AttentionConfig, layer_id: int, tp: TPGroup) -> None:
        self.layer_id = layer_id
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(config.num_kv_heads // tp.size, 1)
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
