"""The gated short convolution of LFM2: y = out(C * conv(B * x)), where B, C and x are projections of the input."""

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kinds.registry import state_shape
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, sharded


class ShortConvMixer(nn.Module):
    """Gated short convolution over hidden states (Liquid AI 2025). Its conv window lives in the backend's MambaPool,
    under `layer_id`.

    Args:
        bias: of the projections and of the conv.
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

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        """Mixer of norm(x + residual), and x + residual."""
        projected, residual = norm_linear(norm, self.in_proj, x, residual)
        return self.out_proj.onto(residual, batch.attn_backend.route(self).run(self, batch, projected=projected))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets of the projections and the conv under `key`."""
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
