"""Feed-forward parts: gated (SwiGLU) and squared-ReLU."""

import torch
from torch import nn

from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), gate and up in one GEMM (Shazeer 2020)."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        build: Build,
    ) -> None:
        super().__init__()
        self.has_bias = bias
        parts = [Segment("gate", intermediate_size), Segment("up", intermediate_size)]
        self.gate_up = ColumnLinear(
            f"{name}.gate_up", hidden_size, parts, bias=("gate", "up") if bias else (), build=build
        )
        self.down = RowLinear(f"{name}.down", [Segment("x", intermediate_size)], hidden_size, bias=bias, build=build)

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> Summands:
        """MLP of norm(x + residual), and x + residual. Of the batch only experts want to know more."""
        h, residual = norm_linear(norm, self.gate_up, x, residual, "silu_and_mul")
        return self.down.onto(residual, h)

    def targets(self, key: str, gate_scale: float = 1.0, down_scale: float = 1.0) -> dict[str, CheckpointTarget]:
        scale, bias = {"gate": gate_scale}, self.has_bias
        return {
            **self.gate_up.targets(f"{key}.gate_proj", ["gate"], bias=bias, scale=scale, bias_scale=scale),
            **self.gate_up.targets(f"{key}.up_proj", ["up"], bias=bias),
            **self.down.targets(f"{key}.down_proj", "x", bias=bias, scale=down_scale),
        }


class Relu2MLP(nn.Module):
    """down(relu(up x)^2) (So et al. 2021, Primer)."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        build: Build,
    ) -> None:
        super().__init__()
        self.has_bias = bias
        self.up = ColumnLinear(
            f"{name}.up", hidden_size, [Segment("up", intermediate_size)], bias=("up",) if bias else (), build=build
        )
        self.down = RowLinear(f"{name}.down", [Segment("x", intermediate_size)], hidden_size, bias=bias, build=build)

    def forward(self, x: torch.Tensor, reduce: bool = True) -> torch.Tensor:
        """[T, hidden] to [T, hidden]; `reduce` as in RowLinear."""
        return self.down(self.up(x, "relu2"), reduce=reduce)

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> Summands:
        """MLP of norm(x + residual), and x + residual. Of the batch only experts want to know more."""
        h, residual = norm_linear(norm, self.up, x, residual, "relu2")
        return self.down.onto(residual, h)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {
            **self.up.targets(f"{key}.up_proj", ["up"], bias=self.has_bias),
            **self.down.targets(f"{key}.down_proj", "x", bias=self.has_bias),
        }
