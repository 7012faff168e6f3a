"""The backend of gated short convolutions: one fused operation for decode rows, the conv between two products else."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.records import ConvWeights
from hybridrt.kernels.short_conv import short_conv_update


class ShortConvAttnBackend(MambaAttnBackendBase):
    """Gated short convolutions (Liquid AI 2025). Input: projected [T, B | C | x]. Result: C * conv(B * x)."""

    kind, saves_at_chunks = "short_conv", True

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        projected = segment.by_row(inputs["projected"])
        if segment.parents is None:
            conv = segment.conv_state(self.layer_cache(layer.layer_id))
            return short_conv_update(projected, self.conv_weights(layer), conv).flatten(0, 1)
        into, out, x = projected.chunk(3, -1)  # the fused kernel does not follow parents
        return (out * self.conv_rows(layer, segment, into * x)).flatten(0, 1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        into, out, x = inputs["projected"].chunk(3, -1)
        return self.conv_chunks(layer, segment, into * x).mul_(out)

    @staticmethod
    def conv_weights(layer: Any) -> ConvWeights:
        return ConvWeights(layer.conv_weight, layer.conv_bias, activation=None)
