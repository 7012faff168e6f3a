"""The Mamba-2 backend: one fused operation for decode rows, conv and chunked scan for prompt chunks."""

from typing import Any

import torch

from hybridrt.kernels.core.records import SSMInputs, SSMWeights
from hybridrt.kernels.core.views import by_head
from hybridrt.kernels.mamba.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba.mamba2_decode_cpu import mamba2_in_place
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_varlen
from hybridrt.recurrent.backend import Inputs, MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class Mamba2AttnBackend(MambaAttnBackendBase):
    """Mamba-2 layers (Dao & Gu 2024).

    Inputs: z [T, H * P], xBC [T, x | B | C] before the conv, dt [T, H]; strided views will do. The result is gated by z
    unless the mixer has a norm, which gates.
    """

    kind, scan, saves_at_chunks = "mamba2", "mamba2_chunk_scan", True

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        cache, rows, out = self.layer_cache(layer.layer_id), segment.pool_rows, inputs.get("out")
        conv_weights = self.conv_weights(layer)
        if rows and cache.ring_values is None:
            xBC, z = inputs["xBC"], inputs["z"] if layer.norm is None else None
            pools = cache.conv, cache.temporal
            if rows.holds(xBC, *pools, conv_weights.weight.shape[1]):
                weights = self.weights(layer)
                return mamba2_in_place(xBC, inputs["dt"], z, conv_weights, weights, *pools, rows, out)
        xBC, dt, gate = segment.by_row(inputs["xBC"]), segment.by_row(inputs["dt"]), None
        if layer.norm is None:
            gate = segment.by_row(inputs["z"]).unflatten(2, (layer.heads, layer.head_dim))
        place = None if out is None else out.view(*dt.shape, layer.head_dim)
        step = segment.fused_step(conv_weights, cache)
        y = mamba2_decode(xBC, dt, gate, weights=self.weights(layer), step=step, out=place)
        return y.reshape(segment.num_tokens, -1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        cache, out = self.layer_cache(layer.layer_id), inputs.get("out")
        conved, state = self.conved_chunks(layer, segment, inputs["xBC"]), segment.state(cache)
        x, B, C = split_conv_channels(conved, state.states.shape)
        z = by_head(inputs["z"], layer.heads, layer.head_dim) if layer.norm is None else None
        place = None if out is None else out.view(x.shape)
        tokens = SSMInputs(x, inputs["dt"], B, C, z)
        return mamba2_chunk_scan(tokens, self.weights(layer), state, segment.prompts, out=place).flatten(1)

    def conved_chunks(self, layer: Any, segment: ExtendSegment, xBC: torch.Tensor) -> torch.Tensor:
        """xBC of prompt chunks behind the conv."""
        cache = self.layer_cache(layer.layer_id)
        return causal_conv1d_varlen(xBC, *segment.conv_chunks(self.conv_weights(layer), cache))

    @staticmethod
    def ring_decay(layer: Any) -> torch.Tensor:
        """Gates of the ring are time steps: A makes decays of them."""
        return layer.A

    @staticmethod
    def weights(layer: Any) -> SSMWeights:
        """A mixer's own numbers, as the operations take them."""
        return SSMWeights(layer.A, layer.D, layer.dt_bias, layer.config.dt_limit)
