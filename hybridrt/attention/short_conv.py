"""The backend of gated short convolutions: one fused operation for decode rows, the conv between two products else."""

from typing import Any

import torch

from hybridrt.kernels.core.records import ConvWeights
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.state.short_conv import short_conv_update
from hybridrt.recurrent.backend import Inputs, MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class ShortConvAttnBackend(MambaAttnBackendBase):
    """Gated short convolutions (Liquid AI 2025). Input: projected [T, B | C | x]. Result: C * conv(B * x)."""

    kind, saves_at_chunks = "short_conv", True

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        projected, cache = segment.by_row(inputs["projected"]), self.layer_cache(layer.layer_id)
        weights = self.conv_weights(layer)
        if segment.parents is None:
            return short_conv_update(projected, weights, segment.conv_state(cache)).flatten(0, 1)
        into, out, x = projected.chunk(3, -1)  # the fused kernel does not follow parents
        return (out * causal_conv1d_update(into * x, *segment.conv_rows(weights, cache))).flatten(0, 1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        into, out, x = inputs["projected"].chunk(3, -1)
        conv = segment.conv_chunks(self.conv_weights(layer), self.layer_cache(layer.layer_id))
        return causal_conv1d_varlen(into * x, *conv).mul_(out)

    @staticmethod
    def conv_weights(layer: Any) -> ConvWeights:
        return ConvWeights(layer.conv_weight, layer.conv_bias, activation=None)
