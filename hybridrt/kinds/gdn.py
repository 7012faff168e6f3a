"""Gated Delta Net (arXiv:2412.06464): value heads with a [V, K] state each; groups share a key head."""

from dataclasses import dataclass

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, check_divides, gated_ring, split_over


@dataclass(frozen=True)
class GDNConfig(LinearConfig):
    """Gated Delta Net mixer, before sharding. `beta_scale` as in hybridrt.kernels.core.records.GateWeights."""

    kind = "gdn"
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int
    chunk_size: int = 64
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divides("GDN key heads", self.num_k_heads, "value heads", self.num_v_heads)


def _shape(config: GDNConfig, tp_size: int) -> StateShape:
    v_heads = split_over("GDN value heads", config.num_v_heads, tp_size)
    k_heads = split_over("GDN key heads", config.num_k_heads, tp_size)
    qk, v = k_heads * config.head_k_dim, v_heads * config.head_v_dim
    temporal = (v_heads, config.head_v_dim, config.head_k_dim)
    return StateShape(config.kind, (("q", qk), ("k", qk), ("v", v)), config.conv_kernel, temporal, k_heads)


KIND = LinearKind(
    title="Gated Delta Net",
    letter="G",
    config=GDNConfig,
    shape=_shape,
    backend="hybridrt.recurrent.gdn:GDNAttnBackend",
    mixer="hybridrt.recurrent.gdn:GDNMixer",
    conv_parts={"q": True, "k": True, "v": False},
    temporal_dims=("heads", "head_dim", "state_dim"),
    ring_shapes=gated_ring,
    codes=True,
)
