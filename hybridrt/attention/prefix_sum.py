"""The backend of running sums."""

from typing import Any

import torch

from hybridrt.kernels.mamba.prefix_sum import prefix_sum_update, prefix_sum_varlen
from hybridrt.recurrent.backend import Inputs, MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class PrefixSumAttnBackend(MambaAttnBackendBase):
    """Running sums within each request. Input: x [T, *dims], as is the result."""

    kind = "prefix_sum"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        x, state = inputs["x"], segment.state(self.layer_cache(layer.layer_id))
        return prefix_sum_update(segment.by_row(x[:, None].flatten(1)), state).view(x.shape)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        x, state = inputs["x"], segment.state(self.layer_cache(layer.layer_id))
        return prefix_sum_varlen(x[:, None].flatten(1), state, segment.prompts.query_start_loc).view(x.shape)
