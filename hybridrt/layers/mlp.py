"""The feed-forward part: gated (SwiGLU) or squared ReLU."""

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.dense.activation import clamped_silu_and_mul
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget


class MLP(nn.Module):
    """down(silu(gate x) * up x), gate and up in one GEMM (Shazeer 2020); or down(relu(up x)^2) (So
    et al. 2021).

    Args:
        activation: "silu_and_mul" for the first, "relu2" for the second.
        scales: multipliers of gate and down.
        limit: clamps both factors of the first (`clamped_silu_and_mul`); None: no clamp.
    """

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, *, activation: Activation = "silu_and_mul",
        bias: bool = False, scales: tuple[float, float] = (1.0, 1.0), limit: float | None = None, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scales, self.limit = scales, limit
        parts = ["gate", "up"] if activation == "silu_and_mul" else ["up"]
        self.activation = activation if limit is None else None  # products do not fuse the clamp
        into = [Segment(part, intermediate_size, bias=bias) for part in parts]
        self.up = ColumnLinear(f"{name}.{'_'.join(parts)}", hidden_size, into, build=build)
        self.down = RowLinear(f"{name}.down", [Segment("x", intermediate_size, bias=bias)], hidden_size, build=build)

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        """MLP of norm(x + residual), and x + residual. `batch` is only for experts."""
        h, residual = self.up.method.apply_normed(norm, x, residual, self.up.bias, self.activation)
        return self.down.onto(residual, h if self.limit is None else clamped_silu_and_mul(h, self.limit))

    def summand(self, x: torch.Tensor, reduce: bool = False) -> torch.Tensor:
        """MLP of x, [T, hidden] to [T, hidden]. `reduce` as in RowLinear."""
        h = self.up(x, self.activation)
        return self.down(h if self.limit is None else clamped_silu_and_mul(h, self.limit), reduce=reduce)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        gate, down = self.scales
        found = self.down.targets(f"{key}.down_proj", "x", scale=down)
        for part in self.up.segments:
            scale = {part: gate if part == "gate" else 1.0}
            found |= self.up.targets(f"{key}.{part}_proj", [part], scale=scale, bias_scale=scale)
        return found
