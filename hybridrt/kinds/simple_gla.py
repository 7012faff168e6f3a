"""Simple gated linear attention: lightning attention with rotary embedding."""

from dataclasses import dataclass

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, split_over


@dataclass(frozen=True)
class SimpleGLAConfig(LinearConfig):
    """Simple GLA, before sharding: H heads of `head_dim` channels."""

    kind = "simple_gla"
    num_heads: int
    head_dim: int
    chunk_size: int = 128


def _shape(config: SimpleGLAConfig, tp_size: int) -> StateShape:
    heads = split_over("linear attention heads", config.num_heads, tp_size)
    return StateShape(config.kind, (), 1, (heads, config.head_dim, config.head_dim), heads)


# No ring: the operation that reads one applies SiLU to its inputs.
KIND = LinearKind(
    title="simple gated linear attention",
    letter="L",
    config=SimpleGLAConfig,
    shape=_shape,
    backend="hybridrt.recurrent.simple_gla:SimpleGLAAttnBackend",
    mixer="hybridrt.recurrent.simple_gla:SimpleGLAMixer",
    conv_parts={},
    temporal_dims=("heads", "head_dim", "state_dim"),
)
