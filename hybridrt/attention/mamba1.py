"""The Mamba-1 backend: conv and selective scan, between which the mixer projects."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.mamba1_update import mamba1_update
from hybridrt.kernels.rms_norm import rms_norm
from hybridrt.kernels.selective_scan import selective_scan


class Mamba1AttnBackend(MambaAttnBackendBase):
    """Mamba-1 layers (Gu & Dao 2023). A mixer calls `forward` twice, because it projects between conv and scan.

    Inputs: x [T, I] alone for the conv; then its output as x, dt [T, I] before bias and softplus, B and C [T, N] before
    their norms, and z [T, I] for the scan. Strided views will do.
    """

    kind = "mamba1"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        if "dt" not in inputs:
            return causal_conv1d_update(segment.by_row(inputs["x"]), **self.conv_rows(layer, segment)).flatten(0, 1)
        cache, slots = self.layer_cache(layer.layer_id), segment.buffers.slots
        x, dt, B, C, z = (segment.by_row(inputs[name]) for name in ("x", "dt", "B", "C", "z"))
        y = mamba1_update(
            cache.temporal, x, dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, z=z, read_slots=slots,
            write_slots=slots, intermediate_states=segment.stored(cache), rows=segment.rows, parents=segment.parents,
            norms=layer.bc_norms,
        )  # fmt: skip
        return y.flatten(0, 1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        if "dt" not in inputs:
            return causal_conv1d_varlen(inputs["x"], **self.conv_chunks(layer, segment))
        x, dt, B, C, z = (inputs[name] for name in ("x", "dt", "B", "C", "z"))
        if norms := layer.bc_norms:
            B, C = rms_norm(B, norms.B, norms.eps), rms_norm(C, norms.C, norms.eps)
        return selective_scan(
            x, dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, z=z,
            states=self.layer_cache(layer.layer_id).temporal, read_slots=segment.read_slots,
            write_slots=segment.write_slots, has_initial_state=segment.has_initial_states,
            query_start_loc=segment.query_start_loc, plan=segment.plan,
        )  # fmt: skip
