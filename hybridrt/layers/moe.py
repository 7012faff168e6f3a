"""Mixture of experts: a router, routed experts as stacked matrices, a shared expert."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.kernels.moe import fused_experts, router_sigmoid_grouped, router_softmax
from hybridrt.layers.weights import Build, Piece, Target, parameter, whole


class SoftmaxRouter(nn.Module):
    """The top k of a softmax over experts (Qwen)."""

    def __init__(
        self, name: str, hidden_size: int, num_experts: int, *, top_k: int, renormalize: bool, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.top_k, self.renormalize = name, top_k, renormalize
        self.weight = parameter(num_experts, hidden_size, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to weights [T, k] float32 and expert ids [T, k] int32."""
        return router_softmax(F.linear(x, self.weight), self.top_k, self.renormalize)

    def targets(self, key: str) -> dict[str, Target]:
        return {f"{key}.weight": whole(f"{self.name}.weight", self.weight.data)}


class SigmoidGroupRouter(nn.Module):
    """The top k of sigmoid scores within the best groups, with a correction bias (DeepSeek-V3, Nemotron-H)."""

    def __init__(
        self, name: str, hidden_size: int, num_experts: int, *, top_k: int, n_group: int, topk_group: int,
        renormalize: bool, scaling: float, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name = name
        self.choice = (top_k, n_group, topk_group, renormalize, scaling)
        self.weight = parameter(num_experts, hidden_size, dtype=torch.float32, device=build.device)
        self.correction = parameter(num_experts, dtype=torch.float32, device=build.device, dummy="zeros")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to weights [T, k] float32 and expert ids [T, k] int32."""
        return router_sigmoid_grouped(F.linear(x.float(), self.weight), self.correction, *self.choice)

    def targets(self, key: str) -> dict[str, Target]:
        return {
            f"{key}.weight": whole(f"{self.name}.weight", self.weight.data),
            f"{key}.e_score_correction_bias": whole(f"{self.name}.correction", self.correction.data),
        }


class Experts(nn.Module):
    """E experts of intermediate size I, stacked: up [E, I or 2 I, in], down [E, in, I]; I is cut over ranks."""

    def __init__(
        self, name: str, num_experts: int, size: int, intermediate_size: int, *,
        activation: Literal["silu", "relu2"], gated: bool, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.num_experts, self.tp = name, num_experts, build.tp
        self.activation: Literal["silu", "relu2"] = activation
        self.gated = gated
        self.local = self.tp.divide("channels of an expert", intermediate_size)
        self.up = parameter(num_experts, self.local * (2 if gated else 1), size, dtype=build.dtype, device=build.device)
        self.down = parameter(num_experts, size, self.local, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, in] to this rank's part of [T, in]; the caller sums over ranks."""
        return fused_experts(x, self.up, self.down, weights, ids, activation=self.activation, gated=self.gated)

    def targets(self, key: str) -> dict[str, Target]:
        """Targets of `key`.{expert}.{gate,up,down}_proj.weight."""
        names = ("gate", "up") if self.gated else ("up",)
        found: dict[str, Target] = {}
        for e in range(self.num_experts):
            for i, name in enumerate(names):
                dest = self.up.data[e, i * self.local : (i + 1) * self.local]
                piece = Piece(f"{self.name}.{e}.{name}", dest, lambda t: self.tp.shard(t, 0))
                found[f"{key}.{e}.{name}_proj.weight"] = (piece,)
            down = Piece(f"{self.name}.{e}.down", self.down.data[e], lambda t: self.tp.shard(t, 1))
            found[f"{key}.{e}.down_proj.weight"] = (down,)
        return found
