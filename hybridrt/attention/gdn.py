"""The Gated Delta Net backend."""

from typing import Any

import torch

from hybridrt.attention.linear import DecodeSegment, ExtendSegment, MambaAttnBackendBase
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.gated_delta_rule import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_rule
from hybridrt.kernels.gdn_decode import gdn_decode
from hybridrt.mem_cache.mamba_pool import LayerCache


class GDNAttnBackend(MambaAttnBackendBase):
    """Gated Delta Net layers (Yang et al. 2025): conv over q|k|v, gates from a and b, then the gated delta rule."""

    kind = "gdn"

    def forward(  # type: ignore[override]  # a recurrent layer's inputs are keywords of its own
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer over all rows.

        Args:
            layer: the GDN mixer: conv weights, A_log, dt_bias and head counts.
            mixed_qkv: [T, q | k | v] before the conv; a, b: [T, Hv]. Strided views will do.
        Returns:
            [T, Hv, V], before the gated norm.
        """
        metadata, cache = self._metadata(), self.layer_cache(layer.layer_id)
        split, parts = metadata.decode.num_tokens if metadata.decode else 0, []
        if metadata.decode:
            parts.append(self._decode(layer, cache, metadata.decode, mixed_qkv[:split], a[:split], b[:split]))
        if metadata.extend:
            parts.append(self._extend(layer, cache, metadata.extend, mixed_qkv[split:], a[split:], b[split:]))
        empty = mixed_qkv.new_empty(0, layer.num_v_heads, layer.head_v_dim)
        return parts[0] if len(parts) == 1 else torch.cat([empty, *parts])

    def _decode(
        self, layer: Any, cache: LayerCache, seg: DecodeSegment, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        buf, per_row = seg.buffers, (seg.rows.shape[0], seg.tokens_per_row)
        qkv, a, b = mixed.view(*per_row, -1), a.view(*per_row, -1), b.view(*per_row, -1)
        if seg.parents is not None:
            return self._verify_tree(layer, cache, seg, qkv, a, b)
        ring = dict(zip(("values", "keys", "gates"), cache.ring)) if cache.ring_values is not None else {}
        out = gdn_decode(
            qkv, a, b, weight=layer.conv_weight, bias=None, A_log=layer.A_log, dt_bias=layer.dt_bias, conv=cache.conv,
            states=cache.temporal, read_slots=buf.slots, write_slots=buf.slots, start_positions=buf.start_positions,
            start=buf.ring_start, length=buf.ring_length, rows=seg.rows,
            # One token is final at once; only a verify step may have to go back.
            intermediate_states=cache.intermediate_ssm if seg.tokens_per_row > 1 else None, **ring,
        )  # fmt: skip
        return out.flatten(0, 1)

    def _verify_tree(
        self, layer: Any, cache: LayerCache, seg: DecodeSegment, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """Draft trees follow parent pointers, which the fused kernel does not."""
        slots = seg.buffers.slots
        conved = causal_conv1d_update(
            qkv, layer.conv_weight, None, cache.conv, slots, slots, seg.buffers.start_positions,
            parents=seg.parents, windows=cache.intermediate_conv_window, rows=seg.rows,
        )  # fmt: skip
        q, k, v = layer.split_heads(conved)
        g, beta = gdn_gates(a, b, layer.A_log, layer.dt_bias)
        out = recurrent_gated_delta_rule(
            cache.temporal, q, k, v, g, beta, read_slots=slots, write_slots=slots,
            intermediate_states=cache.intermediate_ssm, rows=seg.rows, parents=seg.parents,
        )  # fmt: skip
        return out.flatten(0, 1)

    def _extend(
        self, layer: Any, cache: LayerCache, seg: ExtendSegment, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        conved = causal_conv1d_varlen(
            mixed, layer.conv_weight, None, cache.conv, seg.slots, seg.slots, seg.query_start_loc, seg.start_positions
        )
        q, k, v = layer.split_heads(conved)
        g, beta = gdn_gates(a, b, layer.A_log, layer.dt_bias)
        return chunk_gated_delta_rule(
            q, k, v, g, beta, states=cache.temporal, read_slots=seg.slots, write_slots=seg.slots,
            has_initial_state=seg.has_initial_states, query_start_loc=seg.query_start_loc, plan=seg.plan,
        )  # fmt: skip
