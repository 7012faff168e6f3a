"""The Mamba-2 backend: one fused operation for decode rows, conv and chunked scan for prompt chunks."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.records import SSMInputs, SSMWeights
from hybridrt.kernels.selective_state_update import selective_state_update
from hybridrt.kernels.views import by_head


class Mamba2AttnBackend(MambaAttnBackendBase):
    """Mamba-2 layers (Dao & Gu 2024).

    Inputs: z [T, H * P], xBC [T, x | B | C] before the conv, dt [T, H]; strided views will do. The result is gated by z
    unless the mixer has a norm, which gates.
    """

    kind, scan, saves_at_chunks = "mamba2", "mamba2_chunk_scan", True

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        xBC, dt, z = (segment.by_row(inputs[name]) for name in ("xBC", "dt", "z"))
        gate = z.unflatten(2, (layer.heads, layer.head_dim)) if layer.norm is None else None
        if segment.parents is not None:  # the fused kernel does not follow parents
            conved = self.conv_rows(layer, segment, xBC)
            state = segment.state(self.layer_cache(layer.layer_id))
            x, B, C = split_conv_channels(conved, state.states.shape)
            y = selective_state_update(SSMInputs(x, dt, B, C, gate), _weights(layer), state)
            return y.flatten(0, 1).flatten(1)
        out = inputs.get("out")
        place = None if out is None else out.view(*dt.shape, layer.head_dim)
        step = self.fused_step(layer, segment)
        y = mamba2_decode(xBC, dt, gate, weights=_weights(layer), step=step, out=place)
        return y.reshape(segment.num_tokens, -1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        out, state = inputs.get("out"), segment.state(self.layer_cache(layer.layer_id))
        conved = self.conv_chunks(layer, segment, inputs["xBC"])
        x, B, C = split_conv_channels(conved, state.states.shape)
        z = by_head(inputs["z"], layer.heads, layer.head_dim) if layer.norm is None else None
        place = None if out is None else out.view(x.shape)
        tokens = SSMInputs(x, inputs["dt"], B, C, z)
        return mamba2_chunk_scan(tokens, _weights(layer), state, segment.prompts, out=place).flatten(1)

    @staticmethod
    def ring_decay(layer: Any) -> torch.Tensor:
        """Gates of the ring are time steps: A makes decays of them."""
        return layer.A


def _weights(layer: Any) -> SSMWeights:
    return SSMWeights(layer.A, layer.D, layer.dt_bias, layer.config.dt_limit)
