"""The Kimi Delta Attention backend: one operation for decode rows, conv and chunked delta rule for prompt chunks."""

from typing import Any

import torch

from hybridrt.attention.linear import Inputs, MambaAttnBackendBase
from hybridrt.attention.segments import DecodeSegment, ExtendSegment
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from hybridrt.kernels.gdn_decode import gdn_decode
from hybridrt.kernels.records import DeltaInputs, GateWeights


class KDAAttnBackend(MambaAttnBackendBase):
    """Kimi Delta Attention layers (Moonshot AI 2025): conv over q|k|v, then the gated delta rule with a decay for each
    channel of a key. The operations are those of the Gated Delta Net, which compute the gates themselves.

    Inputs: mixed_qkv [T, q | k | v] before the conv, a [T, H * K] and b [T, H]; strided views will do. The norm comes
    after.
    """

    kind, scan = "kda", "chunk_gated_delta_rule"

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        qkv, a, b = (segment.by_row(t) for t in (inputs["mixed_qkv"], layer.by_head(inputs["a"]), inputs["b"]))
        if segment.parents is not None:  # the fused kernel does not follow parents
            q, k, v = layer.split_heads(causal_conv1d_update(qkv, **self.conv_rows(layer, segment)))
            state = segment.state(self.layer_cache(layer.layer_id))
            out = recurrent_gated_delta_rule(DeltaInputs(q, k, v, a, b), state, _weights(layer))
        else:
            out = gdn_decode(qkv, a, b, weights=_weights(layer), step=self.fused_step(layer, segment))
        return out.flatten(0, 1).flatten(1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        q, k, v = layer.split_heads(causal_conv1d_varlen(inputs["mixed_qkv"], **self.conv_chunks(layer, segment)))
        tokens = DeltaInputs(q, k, v, layer.by_head(inputs["a"]), inputs["b"])
        state = segment.state(self.layer_cache(layer.layer_id))
        return chunk_gated_delta_rule(tokens, state, segment.prompts, _weights(layer)).flatten(1)


def _weights(layer: Any) -> GateWeights:
    return GateWeights(layer.A_log, layer.dt_bias, lower_bound=layer.config.lower_bound)
