"""Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): one decay per head; groups of heads share B and C."""

from dataclasses import dataclass

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, check_divides, gated_ring, split_over


@dataclass(frozen=True)
class Mamba2Config(LinearConfig):
    """Mamba-2 mixer, before sharding: H heads of dim P, G groups of B and C, N states a channel."""

    kind = "mamba2"
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    dt_limit: tuple[float, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divides("Mamba-2 groups", self.n_groups, "heads", self.num_heads)

    @property
    def intermediate_size(self) -> int:
        return self.num_heads * self.head_dim


def _shape(config: Mamba2Config, tp_size: int) -> StateShape:
    heads = split_over("Mamba-2 heads", config.num_heads, tp_size)
    groups = 1 if config.n_groups == 1 else split_over("Mamba-2 groups", config.n_groups, tp_size)
    bc = groups * config.state_size
    segments = (("x", heads * config.head_dim), ("B", bc), ("C", bc))
    return StateShape(config.kind, segments, config.conv_kernel, (heads, config.head_dim, config.state_size), groups)


KIND = LinearKind(
    title="Mamba-2",
    letter="M",
    config=Mamba2Config,
    shape=_shape,
    backend="hybridrt.recurrent.mamba2:Mamba2AttnBackend",
    mixer="hybridrt.recurrent.mamba2:Mamba2Mixer",
    conv_parts={"x": False, "B": True, "C": True},
    temporal_dims=("heads", "head_dim", "state_dim"),
    ring_shapes=gated_ring,
    codes=True,
)
