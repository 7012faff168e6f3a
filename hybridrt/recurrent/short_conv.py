"""The gated short convolution of LFM2: mixer and backend of y = out(C * conv(B * x))."""

from typing import NamedTuple

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.records import ConvWeights
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, causal_conv1d_varlen
from hybridrt.kernels.state.short_conv import short_conv_update
from hybridrt.kinds.registry import state_shape
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, sharded
from hybridrt.recurrent.backend import MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class ShortConvInputs(NamedTuple):
    """projected [T, B | C | x]."""

    projected: torch.Tensor


class ShortConvMixer(nn.Module):
    """Gated short convolution (Liquid AI 2025). Its conv window is in MambaPool, under `layer_id`.

    Args:
        bias: whether the projections and the conv have one.
    """

    kind = "short_conv"

    def __init__(
        self, name: str, config: ShortConvConfig, layer_id: int, hidden_size: int, *, bias: bool = False, build: Build
    ) -> None:
        super().__init__()
        self.name, self.config, self.layer_id, self.tp = name, config, layer_id, build.tp
        self.width = state_shape(config, build.tp.size).conv_dim
        parts = [Segment(part, config.channels, bias=bias) for part in ("B", "C", "x")]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden_size, parts, build=build)
        self.conv_weight = parameter(self.width, config.conv_kernel, dtype=build.dtype, device=build.device)
        self.conv_bias = parameter(self.width, dtype=build.dtype, device=build.device, dummy="zeros") if bias else None
        channels = [Segment("x", config.channels, bias=bias)]
        self.out_proj = RowLinear(f"{name}.out_proj", channels, hidden_size, build=build)

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        y = batch.attn_backend.run(self, batch, ShortConvInputs(projected))
        return self.out_proj.onto(residual, y)

    @property
    def conv_weights(self) -> ConvWeights:
        return ConvWeights(self.conv_weight, self.conv_bias, activation=None)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        found = {
            **self.in_proj.targets(f"{key}.in_proj", ["B", "C", "x"]),
            **self.out_proj.targets(f"{key}.out_proj", "x"),
            f"{key}.conv.weight": sharded(
                self.tp, f"{self.name}.conv.weight", self.conv_weight.data, lambda t: t.squeeze(1)
            ),
        }
        if self.conv_bias is not None:
            found[f"{key}.conv.bias"] = sharded(self.tp, f"{self.name}.conv.bias", self.conv_bias.data)
        return found


class ShortConvAttnBackend(MambaAttnBackendBase[ShortConvMixer, ShortConvInputs]):
    """C * conv(B * x) (Liquid AI 2025)."""

    inputs = ShortConvInputs
    kind, saves_at_chunks, extend_in_graphs = "short_conv", True, True

    def decode(
        self, layer: ShortConvMixer, inputs: ShortConvInputs, segment: DecodeSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        projected, cache = segment.by_row(inputs.projected), self.layer_cache(layer.layer_id)
        weights = layer.conv_weights
        if segment.predecessors is None:
            return short_conv_update(projected, weights, segment.conv_state(cache)).flatten(0, 1)
        into, gate, x = projected.chunk(3, -1)  # the fused kernel follows no predecessors
        return (gate * causal_conv1d_update(into * x, *segment.conv_rows(weights, cache))).flatten(0, 1)

    def extend(
        self, layer: ShortConvMixer, inputs: ShortConvInputs, segment: ExtendSegment, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        into, gate, x = inputs.projected.chunk(3, -1)
        conv = segment.conv_chunks(layer.conv_weights, self.layer_cache(layer.layer_id))
        return causal_conv1d_varlen(into * x, *conv).mul_(gate)
