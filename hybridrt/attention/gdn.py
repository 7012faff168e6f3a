"""The Gated Delta Net backend: one fused operation for decode rows, conv and chunked delta rule for prompt chunks."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.gated_delta_rule import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_rule
from hybridrt.kernels.gdn_decode import gdn_decode


class GDNAttnBackend(MambaAttnBackendBase):
    """Gated Delta Net layers (Yang et al. 2025): conv over q|k|v, gates from a and b, then the gated delta rule.

    Inputs: mixed_qkv [T, q | k | v] before the conv, a and b [T, Hv]; strided views will do. The norm comes after.
    """

    kind = "gdn"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        cache, buf = self.layer_cache(layer.layer_id), segment.buffers
        qkv, a, b = (segment.by_row(inputs[name]) for name in ("mixed_qkv", "a", "b"))
        if segment.parents is not None:
            return self._verify_tree(layer, qkv, a, b, segment)
        out = gdn_decode(
            qkv, a, b, weight=layer.conv_weight, bias=None, A_log=layer.A_log, dt_bias=layer.dt_bias, conv=cache.conv,
            states=cache.temporal, read_slots=buf.slots, write_slots=buf.slots, start_positions=buf.start_positions,
            start=buf.ring_start, length=buf.ring_length, rows=segment.rows,
            intermediate_states=segment.stored(cache), **cache.ring_inputs,
        )  # fmt: skip
        return out.flatten(0, 1).flatten(1)

    def _verify_tree(
        self, layer: Any, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, segment: DecodeSegment
    ) -> torch.Tensor:
        """Draft trees follow parent pointers, which the fused kernel does not."""
        cache, slots = self.layer_cache(layer.layer_id), segment.buffers.slots
        q, k, v = layer.split_heads(causal_conv1d_update(qkv, **self.conv_rows(layer, segment)))
        g, beta = gdn_gates(a, b, layer.A_log, layer.dt_bias)
        out = recurrent_gated_delta_rule(
            cache.temporal, q, k, v, g, beta, read_slots=slots, write_slots=slots,
            intermediate_states=cache.intermediate_ssm, rows=segment.rows, parents=segment.parents,
        )  # fmt: skip
        return out.flatten(0, 1).flatten(1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        q, k, v = layer.split_heads(causal_conv1d_varlen(inputs["mixed_qkv"], **self.conv_chunks(layer, segment)))
        g, beta = gdn_gates(inputs["a"], inputs["b"], layer.A_log, layer.dt_bias)
        out = chunk_gated_delta_rule(
            q, k, v, g, beta, states=self.layer_cache(layer.layer_id).temporal, read_slots=segment.read_slots,
            write_slots=segment.write_slots, has_initial_state=segment.has_initial_states,
            query_start_loc=segment.query_start_loc, plan=segment.plan,
        )  # fmt: skip
        return out.flatten(1)
