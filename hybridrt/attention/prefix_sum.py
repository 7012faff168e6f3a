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
        cache, slots = self.layer_cache(layer.layer_id), segment.buffers.slots
        sums = prefix_sum_update(
            segment.by_row(inputs["x"]), cache.temporal, slots, slots, intermediate_states=segment.stored(cache),
            rows=segment.rows, parents=segment.parents,
        )  # fmt: skip
        return sums.flatten(0, 1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        states = self.layer_cache(layer.layer_id).temporal
        slots = segment.read_slots, segment.write_slots
        return prefix_sum_varlen(inputs["x"], states, *slots, segment.query_start_loc)
