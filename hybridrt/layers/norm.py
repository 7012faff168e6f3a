"""RMS norms. Weights are float32: a zero-centred (1 + w) would lose bits in bfloat16."""

from dataclasses import replace

import torch
from torch import nn

from hybridrt.kernels.dense.gated_norm import GATE_ACTIVATIONS, GateActivation, gated_rms_norm
from hybridrt.kernels.dense.rms_norm import add_rms_norm, rms_norm
from hybridrt.layers.weights import Build, CheckpointTarget, parameter, whole


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last dimension (Zhang & Sennrich 2019).

    Args:
        zero_centered: the checkpoint stores w - 1 (Qwen3-Next).
        scale: multiplier of the output, applied to w.
        learned: False: w = 1, in no checkpoint.

    Attributes:
        add: `add_rms_norm` on this device, for a product that reads weight and eps itself.
    """

    weight: torch.Tensor

    def __init__(
        self, name: str, size: int, eps: float, *, device: torch.device, zero_centered: bool = False,
        scale: float = 1.0, learned: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.eps, self.zero_centered, self.scale, self.learned = name, eps, zero_centered, scale, learned
        if learned:
            self.weight = parameter(size, dtype=torch.float32, device=device, dummy="ones")
        else:
            self.register_buffer("weight", torch.ones(size, dtype=torch.float32, device=device))
        self._norm, self.add = rms_norm.for_device(device), add_rms_norm.for_device(device)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x)."""
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        return self.add(x, residual, self.weight, self.eps)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        if not self.learned:
            return {}
        offset = 1.0 if self.zero_centered else 0.0
        return {
            f"{key}.weight": whole(f"{self.name}.weight", self.weight.data, lambda t: t.float() + offset, self.scale)
        }


class SharedRMSNorm(RMSNorm):
    """RMS norm of a vector of `size` numbers over all ranks, each on `copies` ranks."""

    def __init__(self, name: str, size: int, eps: float, *, shards: int, build: Build) -> None:
        super().__init__(name, size // shards, eps, device=build.device)
        self.tp, self.size, self.shards = build.tp, size, shards

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.shards == 1:
            return super().forward(x, residual)
        h = x.float()
        copies = self.tp.size // self.shards
        squares = self.tp.all_reduce(h.square().sum(-1, keepdim=True)) / copies
        return (h * torch.rsqrt(squares / self.size + self.eps) * self.weight).to(x.dtype), x

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        (target,) = super().targets(key).values()
        select = target[0].select
        return {f"{key}.weight": (replace(target[0], select=lambda t: self.tp.shard(select(t), 0, self.shards)),)}


class GatedRMSNorm(nn.Module):
    """RMS norm in groups with a gate, before or after it (Mamba-2, GDN, KDA).

    Args:
        size: width on this rank. `group_size` divides it, or is the width over all ranks.
        activation: of the gate.
    """

    def __init__(
        self, size: int, eps: float, *, group_size: int, norm_before_gate: bool,
        activation: GateActivation = "silu", build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation: GateActivation = activation
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.tp, self.spans_ranks = build.tp, group_size > size
        self.weight = parameter(size, dtype=torch.float32, device=build.device, dummy="ones")

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [T, size] to [T, size]."""
        if self.spans_ranks:
            return self._across_ranks(x, gate)
        return gated_rms_norm(
            x, gate, self.weight, self.eps, group_size=self.group_size, norm_before_gate=self.norm_before_gate,
            activation=self.activation,
        )  # fmt: skip

    def _across_ranks(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """One group over all ranks, which sum their squares."""
        gating = GATE_ACTIVATIONS[self.activation](gate.float())
        h = x.float() if self.norm_before_gate else x.float() * gating
        squares = self.tp.all_reduce(h.square().sum(-1, keepdim=True))
        h = h * torch.rsqrt(squares / self.group_size + self.eps) * self.weight
        return (h * gating if self.norm_before_gate else h).to(x.dtype)
