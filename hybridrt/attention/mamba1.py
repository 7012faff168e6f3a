"""The Mamba-1 backend: conv and selective scan of a mixer, decode rows and prompt chunks each by their own kernels."""

from typing import Any

import torch

from hybridrt.attention.linear import DecodeSegment, ExtendSegment, MambaAttnBackendBase
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.mamba1_update import mamba1_update
from hybridrt.kernels.rms_norm import rms_norm
from hybridrt.kernels.selective_scan import selective_scan
from hybridrt.mem_cache.mamba_pool import LayerCache


class Mamba1AttnBackend(MambaAttnBackendBase):
    """Mamba-1 layers (Gu & Dao 2023). A mixer calls `conv`, works out dt, B and C, then calls `forward`."""

    kind = "mamba1"

    def conv(self, x: torch.Tensor, layer: Any, batch: ForwardBatch) -> torch.Tensor:
        """The causal conv and SiLU of one mixer: x [T, I], maybe a strided view, to [T, I]. Comes before `forward`."""
        metadata, cache = self._metadata(), self.layer_cache(layer.layer_id)
        split, parts = metadata.decode.num_tokens if metadata.decode else 0, []
        if seg := metadata.decode:
            slots, per_row = seg.buffers.slots, x[:split].unflatten(0, (-1, seg.tokens_per_row))
            conved = causal_conv1d_update(
                per_row, layer.conv_weight, layer.conv_bias, cache.conv, slots, slots, seg.buffers.start_positions,
                parents=seg.parents, windows=None if seg.parents is None else cache.intermediate_conv_window,
                rows=seg.rows,
            )  # fmt: skip
            parts.append(conved.flatten(0, 1))
        if chunks := metadata.extend:
            places = (chunks.slots, chunks.slots, chunks.query_start_loc, chunks.start_positions)
            parts.append(causal_conv1d_varlen(x[split:], layer.conv_weight, layer.conv_bias, cache.conv, *places))
        return parts[0] if len(parts) == 1 else torch.cat([x[:0], *parts])

    def forward(  # type: ignore[override]  # a recurrent layer's inputs are keywords of its own
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        z: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Selective scan, skip and gate of one mixer.

        Args:
            layer: the Mamba1Mixer: its A, D, dt_bias and norms.
            x: [T, I] of `conv`; dt: [T, I] before bias and softplus; B, C: [T, N] before their norms; z: [T, I].
                Strided views will do.
        Returns:
            [T, I]: what the output projection reads.
        """
        metadata, cache, inputs = self._metadata(), self.layer_cache(layer.layer_id), (x, dt, B, C, z)
        split, parts = metadata.decode.num_tokens if metadata.decode else 0, []
        if metadata.decode:
            parts.append(self._decode(layer, cache, metadata.decode, *(t[:split] for t in inputs)))
        if metadata.extend:
            parts.append(self._extend(layer, cache, metadata.extend, *(t[split:] for t in inputs)))
        return parts[0] if len(parts) == 1 else torch.cat([x[:0], *parts])

    @staticmethod
    def _decode(layer: Any, cache: LayerCache, seg: DecodeSegment, *inputs: torch.Tensor) -> torch.Tensor:
        x, dt, B, C, z = (t.unflatten(0, (-1, seg.tokens_per_row)) for t in inputs)
        slots = seg.buffers.slots
        y = mamba1_update(
            cache.temporal, x, dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, z=z, read_slots=slots,
            # One token is final at once; only a verify step may have to go back.
            write_slots=slots, intermediate_states=cache.intermediate_ssm if seg.tokens_per_row > 1 else None,
            rows=seg.rows, parents=seg.parents, norms=layer.bc_norms,
        )  # fmt: skip
        return y.flatten(0, 1)

    @staticmethod
    def _extend(layer: Any, cache: LayerCache, seg: ExtendSegment, *inputs: torch.Tensor) -> torch.Tensor:
        x, dt, B, C, z = inputs
        if norms := layer.bc_norms:
            B, C = rms_norm(B, norms.B, norms.eps), rms_norm(C, norms.C, norms.eps)
        return selective_scan(
            x, dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, z=z, states=cache.temporal, read_slots=seg.slots,
            write_slots=seg.slots, has_initial_state=seg.has_initial_states, query_start_loc=seg.query_start_loc,
            plan=seg.plan,
        )  # fmt: skip
