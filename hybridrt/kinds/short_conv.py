"""Gated short convolution (Liquid AI 2025): a causal conv between two gates, no other state."""

from dataclasses import dataclass

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, split_over


@dataclass(frozen=True)
class ShortConvConfig(LinearConfig):
    """Gated short convolution, before sharding: `channels` of `conv_kernel` taps."""

    kind = "short_conv"
    channels: int
    conv_kernel: int
    chunk_size: int = 64


def _shape(config: ShortConvConfig, tp_size: int) -> StateShape:
    channels = split_over("short conv channels", config.channels, tp_size)
    return StateShape(config.kind, (("x", channels),), config.conv_kernel, (0,), 1)


def _ring(shape: StateShape, width: int) -> dict[str, tuple[int, ...]]:
    """Empty: the conv's ring is rolled back by position."""
    return {}


KIND = LinearKind(
    title="short conv",
    letter="C",
    config=ShortConvConfig,
    shape=_shape,
    backend="hybridrt.recurrent.short_conv:ShortConvAttnBackend",
    mixer="hybridrt.recurrent.short_conv:ShortConvMixer",
    conv_parts={"x": False},
    temporal_dims=(),
    ring_shapes=_ring,
    replay_pays=False,  # there are no recurrent states to write
)
