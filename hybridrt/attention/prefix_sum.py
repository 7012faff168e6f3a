"""The backend of running sums."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.prefix_sum import prefix_sum_update, prefix_sum_varlen


class PrefixSumAttnBackend(MambaAttnBackendBase):
    """Running sums within each request. Input: x [T, *dims], as is the result."""

    kind = "prefix_sum"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        state = segment.state(self.layer_cache(layer.layer_id))
        return prefix_sum_update(segment.by_row(inputs["x"]), state).flatten(0, 1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        state = segment.state(self.layer_cache(layer.layer_id))
        return prefix_sum_varlen(inputs["x"], state, segment.prompts.query_start_loc)
