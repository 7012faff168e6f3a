"""A running sum of hidden states: the simplest recurrence makes a lost state or wrong slot obvious."""

from dataclasses import dataclass

import torch

from hybridrt.base.model_config import LinearConfig
from hybridrt.kinds.base import LinearKind, StateShape


@dataclass(frozen=True)
class PrefixSumConfig(LinearConfig):
    """One sum of `hidden_size` numbers."""

    kind = "prefix_sum"
    hidden_size: int
    chunk_size: int = 32


def _shape(config: PrefixSumConfig, tp_size: int) -> StateShape:
    return StateShape(config.kind, (), 1, (config.hidden_size,), 1)  # hidden states are whole on every rank


KIND = LinearKind(
    title="prefix sum",
    letter="S",
    config=PrefixSumConfig,
    shape=_shape,
    backend="hybridrt.recurrent.prefix_sum:PrefixSumAttnBackend",
    mixer="hybridrt.recurrent.prefix_sum:PrefixSumMixer",
    conv_parts={},
    temporal_dims=("hidden",),
    cut_state=False,
    # Nothing in a sum decays: rounding errors stay.
    state_dtype=torch.float32,
)
