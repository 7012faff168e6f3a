"""Gated RMS norm over groups, of Mamba-2 mixers (RMSNormGated, Dao & Gu 2024)."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation

GateActivation = Literal["silu", "sigmoid"]
GATE_ACTIVATIONS: dict[GateActivation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def _check(x: Tensor, *_: Any, group_size: int, **__: Any) -> None:
    if x.shape[-1] % group_size:
        raise ConfigError(f"gated norm: group_size {group_size} does not divide {x.shape[-1]} channels")


@operation(By("triton"), By("mamba_ssm", priority=5), check=_check)
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool,
    activation: GateActivation = "silu",
) -> Tensor:  # fmt: skip
    """norm(x) * act(gate) if `norm_before_gate`, else norm(x * act(gate)), in groups of
    `group_size`.

    Args:
        x, gate: [T, D], last dimension contiguous. weight: [D] float32.
        activation: act.

    Returns:
        [T, D] in x's dtype; float32 inside.

    Raises:
        ConfigError: D is no multiple of `group_size`.
    """
    gating = GATE_ACTIVATIONS[activation](gate.float())
    h = x.float() if norm_before_gate else x.float() * gating
    h = F.rms_norm(h.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight
    return (h * gating if norm_before_gate else h).to(x.dtype)
