"""The backend of lightning attention: Mamba-2's operations, for a layer without a conv, steps, skip or gate."""

from typing import Any

import torch
import torch.nn.functional as F

from hybridrt.attention.linear import Inputs
from hybridrt.attention.mamba2 import Mamba2AttnBackend
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.records import ConvWeights, SSMInputs, SSMWeights
from hybridrt.kernels.selective_state_update import selective_state_update


class LightningAttnBackend(Mamba2AttnBackend):
    """Lightning attention: S_t = exp(A) S_{t-1} + v_t k_t^T and y_t = S_t q_t in each head, with SiLU on q, k and v.

    This is Mamba-2 with x = v, B = k and C = q, a group for each head, and a time step of one.

    Input: vkq [T, v | k | q] before SiLU; a strided view will do.
    """

    kind = "lightning"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        vkq = segment.by_row(inputs["vkq"])
        steps = layer.steps.expand(*vkq.shape[:2], -1)
        if segment.parents is not None:  # the fused kernel does not follow parents
            state = segment.state(self.layer_cache(layer.layer_id))
            v, k, q = split_conv_channels(F.silu(vkq), state.states.shape)
            y = selective_state_update(SSMInputs(v, steps, k, q), _weights(layer), state)
            return y.flatten(0, 1).flatten(1)
        y = mamba2_decode(vkq, steps, None, weights=_weights(layer), step=self.fused_step(layer, segment))
        return y.reshape(segment.num_tokens, -1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        state = segment.state(self.layer_cache(layer.layer_id))
        v, k, q = split_conv_channels(F.silu(inputs["vkq"]), state.states.shape)
        tokens = SSMInputs(v, layer.steps.expand(len(v), -1), k, q)
        return mamba2_chunk_scan(tokens, _weights(layer), state, segment.prompts).flatten(1)

    @staticmethod
    def conv_weights(layer: Any) -> ConvWeights:
        return ConvWeights(layer.no_taps)


def _weights(layer: Any) -> SSMWeights:
    """The limits make every time step one, whatever the raw step."""
    return SSMWeights(layer.A, dt_limit=(1.0, 1.0))
