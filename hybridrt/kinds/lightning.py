"""Lightning attention (Qin et al. 2024): linear attention with a fixed decay per head, no conv."""

from dataclasses import dataclass

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, gated_ring, split_over


@dataclass(frozen=True)
class LightningConfig(LinearConfig):
    """Lightning attention, before sharding: H heads of `head_dim` channels."""

    kind = "lightning"
    num_heads: int
    head_dim: int
    chunk_size: int = 128


def _shape(config: LightningConfig, tp_size: int) -> StateShape:
    heads = split_over("lightning attention heads", config.num_heads, tp_size)
    return StateShape(config.kind, (), 1, (heads, config.head_dim, config.head_dim), heads)


KIND = LinearKind(
    title="lightning attention",
    letter="L",
    config=LightningConfig,
    shape=_shape,
    backend="hybridrt.recurrent.lightning:LightningAttnBackend",
    mixer="hybridrt.recurrent.lightning:LightningMixer",
    conv_parts={},
    temporal_dims=("heads", "head_dim", "state_dim"),
    ring_shapes=gated_ring,
)
