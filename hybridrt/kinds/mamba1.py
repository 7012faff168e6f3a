"""Mamba-1 (Gu & Dao 2023, arXiv:2312.00752): N states per channel, each with its own decay."""

from dataclasses import dataclass

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape, split_over


@dataclass(frozen=True)
class Mamba1Config(LinearConfig):
    """Mamba-1 mixer, before sharding: I channels of N states, time steps of rank `dt_rank`."""

    kind = "mamba1"
    intermediate_size: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    chunk_size: int = 32


def _shape(config: Mamba1Config, tp_size: int) -> StateShape:
    channels = split_over("Mamba-1 channels", config.intermediate_size, tp_size)
    return StateShape(config.kind, (("x", channels),), config.conv_kernel, (channels, config.state_size), 1)


# No ring: each state decays on its own, so inputs would need as much memory.
KIND = LinearKind(
    title="Mamba-1",
    letter="M",
    config=Mamba1Config,
    shape=_shape,
    backend="hybridrt.recurrent.mamba1:Mamba1AttnBackend",
    mixer="hybridrt.recurrent.mamba1:Mamba1Mixer",
    conv_parts={"x": False},
    temporal_dims=("channels", "states"),
)
