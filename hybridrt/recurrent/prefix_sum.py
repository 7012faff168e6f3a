"""Running sums of hidden states: a mixer without weights, and its backend."""

from typing import NamedTuple

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.mamba.prefix_sum import prefix_sum_update, prefix_sum_varlen
from hybridrt.kinds.prefix_sum import PrefixSumConfig
from hybridrt.layers.weights import Build, CheckpointTarget
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class PrefixSumInputs(NamedTuple):
    """x [T, *dims]."""

    x: torch.Tensor


class PrefixSumMixer(nn.Module):
    """Running sums within each request. The state is in MambaPool, under `layer_id`."""

    kind = "prefix_sum"

    def __init__(self, name: str, config: PrefixSumConfig, layer_id: int, hidden_size: int, *, build: Build) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp, self.width = name, config, layer_id, build.tp, hidden_size

    def summand(self, hidden_states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, *dims] to [T, *dims]. Hidden states are whole on every rank, so one rank returns the
        sums and the others zeros."""
        sums: torch.Tensor = batch.attn_backend.run(self, batch, PrefixSumInputs(hidden_states))
        return sums if self.tp.rank == 0 else torch.zeros_like(sums)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {}


class PrefixSumAttnBackend(MambaAttnBackendBase[PrefixSumMixer, PrefixSumInputs]):
    """Running sums within each request: [T, *dims], as x."""

    inputs = PrefixSumInputs
    kind, extend_in_graphs = "prefix_sum", True

    def decode(
        self, layer: PrefixSumMixer, inputs: PrefixSumInputs, segment: DecodeSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, state = inputs.x, segment.state(self.layer_cache(layer.layer_id))
        return prefix_sum_update(segment.by_row(x[:, None].flatten(1)), state).view(x.shape)

    def extend(
        self, layer: PrefixSumMixer, inputs: PrefixSumInputs, segment: ExtendSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, state = inputs.x, segment.state(self.layer_cache(layer.layer_id))
        return prefix_sum_varlen(x[:, None].flatten(1), state, segment.prompts.query_start_loc).view(x.shape)
