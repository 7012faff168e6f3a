"""The Gated Delta Net backend: one fused operation for decode rows, conv and chunked delta rule for prompt chunks."""

from typing import Any

import torch

from hybridrt.kernels.core.records import DeltaInputs, GateWeights
from hybridrt.kernels.delta_rule.decode import gdn_decode, split_qkv
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_varlen
from hybridrt.recurrent.backend import Inputs, MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class GDNAttnBackend(MambaAttnBackendBase):
    """Gated Delta Net layers (Yang et al. 2025): conv over q|k|v, gates from a and b, then the gated delta rule.

    Inputs: mixed_qkv [T, q | k | v] before the conv, a and b [T, Hv]; strided views will do. The norm comes after.
    """

    kind, scan = "gdn", "chunk_gated_delta_rule"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        qkv, a, b = (segment.by_row(inputs[name]) for name in ("mixed_qkv", "a", "b"))
        step = segment.fused_step(self.conv_weights(layer), self.layer_cache(layer.layer_id))
        out = gdn_decode(qkv, a, b, weights=self.weights(layer), step=step)
        return out.flatten(0, 1).flatten(1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        cache = self.layer_cache(layer.layer_id)
        conved = causal_conv1d_varlen(inputs["mixed_qkv"], *segment.conv_chunks(self.conv_weights(layer), cache))
        state = segment.state(cache)
        tokens = DeltaInputs(*split_qkv(conved, state.states), inputs["a"], inputs["b"])
        return chunk_gated_delta_rule(tokens, state, segment.prompts, self.weights(layer)).flatten(1)

    @staticmethod
    def weights(layer: Any) -> GateWeights:
        """What gates are made of."""
        return GateWeights(layer.A_log, layer.dt_bias, layer.config.beta_scale)
