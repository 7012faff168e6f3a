"""Kimi Delta Attention (Moonshot AI 2025): a Gated Delta Net with a decay gate per key channel."""

from dataclasses import dataclass

from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, gated_ring, split_over


@dataclass(frozen=True)
class KDAConfig(LinearConfig):
    """Kimi Delta Attention mixer, before sharding: H heads of q, k and v, each of `head_dim`
    channels.

    Attributes:
        gate_rank: rank of the projections of decay and output gate; None for full rank.
        lower_bound: bound of the log decay, see hybridrt.kernels.core.records.GateWeights.
    """

    kind = "kda"
    num_heads: int
    head_dim: int
    conv_kernel: int
    chunk_size: int = 64
    gate_rank: int | None = None
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_rank is not None and self.gate_rank < 1:
            raise ConfigError(f"kda: gate_rank is {self.gate_rank}; it must be positive, or None for full rank")
        if self.lower_bound is not None and not self.lower_bound < 0:
            raise ConfigError(f"kda: lower_bound is {self.lower_bound}; a log of a decay is negative")


def _shape(config: KDAConfig, tp_size: int) -> StateShape:
    heads, dim = split_over("KDA heads", config.num_heads, tp_size), config.head_dim
    segments = tuple((part, heads * dim) for part in ("q", "k", "v"))
    return StateShape(config.kind, segments, config.conv_kernel, (heads, dim, dim), heads)


def _ring(shape: StateShape, width: int) -> dict[str, tuple[int, ...]]:
    """Has gates by key channel: in float32 twice the bytes of the keys."""
    return gated_ring(shape, width) | {"ring_gates": (shape.groups, width, shape.temporal[2])}


KIND = LinearKind(
    title="Kimi Delta Attention",
    letter="K",
    config=KDAConfig,
    shape=_shape,
    backend="hybridrt.recurrent.kda:KDAAttnBackend",
    mixer="hybridrt.recurrent.kda:KDAMixer",
    conv_parts={"q": False, "k": False, "v": False},
    temporal_dims=("heads", "head_dim", "state_dim"),
    ring_shapes=_ring,
    codes=True,
    replay_pays=False,  # Kimi-Linear, 128 rows, H200: 11.8 ms a step, 11.5 without
)
