"""The Mamba-2 backend: one fused operation for decode rows, conv and chunked scan for prompt chunks."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.selective_state_update import selective_state_update


class Mamba2AttnBackend(MambaAttnBackendBase):
    """Mamba-2 layers (Dao & Gu 2024).

    Inputs: z [T, H * P], xBC [T, x | B | C] before the conv, dt [T, H]; strided views will do. The result is gated by z
    unless the mixer has a norm, which gates.
    """

    kind = "mamba2"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        cache, buf = self.layer_cache(layer.layer_id), segment.buffers
        xBC, dt, z = (segment.by_row(inputs[name]) for name in ("xBC", "dt", "z"))
        gate = z.unflatten(2, (layer.heads, layer.head_dim)) if layer.norm is None else None
        if segment.parents is not None:
            return self._verify_tree(layer, xBC, dt, gate, segment)
        out = inputs.get("out")
        y = mamba2_decode(
            xBC, dt, gate, weight=layer.conv_weight, bias=layer.conv_bias, A=layer.A, D=layer.D, dt_bias=layer.dt_bias,
            dt_limit=layer.config.dt_limit, conv=cache.conv, states=cache.temporal, read_slots=buf.slots,
            write_slots=buf.slots, start_positions=buf.start_positions, start=buf.ring_start, length=buf.ring_length,
            intermediate_states=segment.stored(cache), rows=segment.rows,
            out=None if out is None else out.view(*dt.shape, layer.head_dim), **cache.ring_inputs,
        )  # fmt: skip
        return y.reshape(segment.num_tokens, -1)

    def _verify_tree(
        self, layer: Any, xBC: torch.Tensor, dt: torch.Tensor, gate: torch.Tensor | None, segment: DecodeSegment
    ) -> torch.Tensor:
        """Draft trees follow parent pointers, which the fused kernel does not."""
        cache, slots = self.layer_cache(layer.layer_id), segment.buffers.slots
        x, B, C = layer.split_heads(causal_conv1d_update(xBC, **self.conv_rows(layer, segment)))
        y = selective_state_update(
            cache.temporal, x, dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, dt_limit=layer.config.dt_limit,
            z=gate, read_slots=slots, write_slots=slots, intermediate_states=cache.intermediate_ssm, rows=segment.rows,
            parents=segment.parents,
        )  # fmt: skip
        return y.flatten(0, 1).flatten(1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        cache, out = self.layer_cache(layer.layer_id), inputs.get("out")
        x, B, C = layer.split_heads(causal_conv1d_varlen(inputs["xBC"], **self.conv_chunks(layer, segment)))
        z = inputs["z"].view(x.shape) if layer.norm is None else None
        y = mamba2_chunk_scan(
            x, inputs["dt"], layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, dt_limit=layer.config.dt_limit, z=z,
            states=cache.temporal, read_slots=segment.read_slots, write_slots=segment.write_slots,
            has_initial_state=segment.has_initial_states, query_start_loc=segment.query_start_loc, plan=segment.plan,
            out=None if out is None else out.view(x.shape),
        )  # fmt: skip
        return y.flatten(1)

    @staticmethod
    def ring_decay(layer: Any) -> torch.Tensor:
        """Gates of the ring are time steps: A makes decays of them."""
        decay: torch.Tensor = layer.A
        return decay
