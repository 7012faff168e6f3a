"""Mixture of experts: routers, and experts as stacked matrices, those that every token passes among them."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.moe import fused_experts, router_sigmoid_grouped, router_softmax
from hybridrt.layers.linear import DenseMethod, Summands
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, whole


class SoftmaxRouter(nn.Module):
    """The top k of a softmax over experts (Qwen, Jamba).

    Args:
        shared_experts: how many experts after the routed ones every token passes; the sigmoid of one more row of the
            product weighs them.
    """

    def __init__(
        self, name: str, hidden_size: int, num_experts: int, *, top_k: int, renormalize: bool, build: Build,
        shared_experts: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.top_k, self.renormalize = name, top_k, renormalize
        self.num_experts, self.shared_experts, self.method = num_experts, shared_experts, DenseMethod()
        # Eight rows for one gate: logits of a token then begin where a 16-byte access may.
        self.weight = self.method.create(num_experts + (8 if shared_experts else 0), hidden_size, build)
        self.weight.data[num_experts:].zero_()

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to weights [T, k + shared experts] float32 and expert ids, int32; no expert for padding."""
        logits = self.method.apply(x, self.weight, None)
        gate = logits[:, self.num_experts] if self.shared_experts else None
        choice = self.top_k, self.renormalize, gate, self.shared_experts
        return router_softmax(logits[:, : self.num_experts], *choice, batch.padded_rows)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        rows = self.method.slot(self.weight, 0, 0, self.num_experts)
        return {f"{key}.weight": whole(f"{self.name}.weight", rows)}

    def shared_gate_targets(self, key: str) -> dict[str, CheckpointTarget]:
        row = self.method.slot(self.weight, 0, self.num_experts, 1)
        return {f"{key}.weight": whole(f"{self.name}.shared_gate.weight", row)}


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

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to weights [T, k] float32 and expert ids [T, k] int32; no expert for padding."""
        logits = F.linear(x.float(), self.weight)
        return router_sigmoid_grouped(logits, self.correction, *self.choice, batch.padded_rows)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {
            f"{key}.weight": whole(f"{self.name}.weight", self.weight.data),
            f"{key}.e_score_correction_bias": whole(f"{self.name}.correction", self.correction.data),
        }


class Experts(nn.Module):
    """E experts of intermediate size I, stacked: up [E, I or 2 I, in], down [E, in, I]; I is cut over ranks.

    Args:
        shared_size: intermediate size of an MLP that every token passes. It is the sum of `num_shared` MLPs of size I,
            the last filled up with zeros, and they follow the others as experts E, E + 1, ...
    """

    def __init__(
        self, name: str, num_experts: int, size: int, intermediate_size: int, *,
        activation: Literal["silu", "relu2"], gated: bool, build: Build, shared_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.num_experts, self.tp = name, num_experts, build.tp
        self.activation: Literal["silu", "relu2"] = activation
        self.gated = gated
        self.local = self.tp.divide("channels of an expert", intermediate_size)
        self.shared_size, self.num_shared = shared_size, -(-shared_size // intermediate_size)
        count, inner = num_experts + self.num_shared, self.local * (2 if gated else 1)
        self.up = parameter(count, inner, size, dtype=build.dtype, device=build.device)
        self.down = parameter(count, size, self.local, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[T, in] to this rank's part of [T, in]; the caller sums over ranks."""
        return fused_experts(x, self.up, self.down, weights, ids, activation=self.activation, gated=self.gated)

    def _up_parts(self) -> list[tuple[str, torch.Tensor]]:
        names = ("gate", "up") if self.gated else ("up",)
        return list(zip(names, self.up.data.split(self.local, dim=1), strict=True))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets of `key`.{expert}.{gate,up,down}_proj.weight."""
        found: dict[str, CheckpointTarget] = {}
        for e in range(self.num_experts):
            for name, dest in self._up_parts():
                found[f"{key}.{e}.{name}_proj.weight"] = whole(f"{self.name}.{e}.{name}", dest[e], self._rows)
            down = whole(f"{self.name}.{e}.down", self.down.data[e], lambda t: self.tp.shard(t, 1))
            found[f"{key}.{e}.down_proj.weight"] = down
        return found

    def shared_targets(self, key: str) -> dict[str, CheckpointTarget]:
        """Targets of `key`.{gate,up,down}_proj.weight."""

        size = self.local * self.tp.size

        def by_expert(t: torch.Tensor) -> torch.Tensor:
            """[shared_size, in] to [num_shared, this rank's part of I, in]."""
            whole_rows = t.split([self.shared_size])[0]  # split: it raises if there are more or fewer
            padded = F.pad(whole_rows, (0, 0, 0, self.num_shared * size - self.shared_size))
            return self.tp.shard(padded.unflatten(0, (self.num_shared, size)), 1)

        found = {
            f"{key}.{name}_proj.weight": whole(f"{self.name}.shared.{name}", dest[self.num_experts :], by_expert)
            for name, dest in self._up_parts()
        }
        down = whole(
            f"{self.name}.shared.down", self.down.data[self.num_experts :], lambda t: by_expert(t.t()).transpose(1, 2)
        )
        return {**found, f"{key}.down_proj.weight": down}

    def _rows(self, t: torch.Tensor) -> torch.Tensor:
        return self.tp.shard(t, 0)


class SoftmaxMoE(nn.Module):
    """A softmax router and its experts in the place of an MLP (Qwen, Jamba)."""

    def __init__(self, router: SoftmaxRouter, experts: Experts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def after_norm(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> Summands:
        """Experts of norm(x + residual), and x + residual."""
        h, residual = norm(x, residual)
        return self.experts.tp.all_reduce(self.experts(h, *self.router(h, batch))), residual
