"""The Mamba-1 backend: conv and selective scan, between which the mixer projects."""

from typing import Any

import torch

from hybridrt.kernels.core.records import SSMInputs, SSMWeights
from hybridrt.kernels.dense.rms_norm import rms_norm
from hybridrt.kernels.mamba.mamba1_update import mamba1_update
from hybridrt.kernels.mamba.selective_scan import selective_scan
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.recurrent.backend import Inputs, MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class Mamba1AttnBackend(MambaAttnBackendBase):
    """Mamba-1 layers (Gu & Dao 2023). A mixer calls `forward` twice, because it projects between conv and scan.

    Inputs: x [T, I] alone for the conv; then its output as x, dt [T, I] before bias and softplus, B and C [T, N] before
    their norms, and z [T, I] for the scan. Strided views will do.
    """

    kind, saves_at_chunks = "mamba1", True

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        if "dt" not in inputs:
            conv = segment.conv_rows(self.conv_weights(layer), cache)
            return causal_conv1d_update(segment.by_row(inputs["x"]), *conv).flatten(0, 1)
        tokens = SSMInputs(*(segment.by_row(inputs[name]) for name in SSMInputs._fields))
        return mamba1_update(tokens, _weights(layer), segment.state(cache), layer.bc_norms).flatten(0, 1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        if "dt" not in inputs:
            return causal_conv1d_varlen(inputs["x"], *segment.conv_chunks(self.conv_weights(layer), cache))
        tokens = SSMInputs(*(inputs[name] for name in SSMInputs._fields))
        if norms := layer.bc_norms:
            B, C = rms_norm(tokens.B, norms.B_weight, norms.eps), rms_norm(tokens.C, norms.C_weight, norms.eps)
            tokens = tokens._replace(B=B, C=C)
        return selective_scan(tokens, _weights(layer), segment.state(cache), segment.prompts)


def _weights(layer: Any) -> SSMWeights:
    return SSMWeights(layer.A, layer.D, layer.dt_bias)
