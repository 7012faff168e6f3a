"""Grouped RMS norm with a SiLU gate, the norm of Mamba-2 mixers (RMSNormGated, Dao & Gu 2024)."""

import torch.nn.functional as F
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.providers import register, select

register("gated_rms_norm", "torch", "hybridrt.kernels.gated_norm:gated_rms_norm_reference")
register("gated_rms_norm", "triton", "hybridrt.kernels.gated_norm_triton:gated_rms_norm_triton", priority=10)
register("gated_rms_norm", "mamba_ssm", "hybridrt.kernels.libraries.mamba_ssm:gated_rms_norm", priority=5)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool
) -> Tensor:
    """norm(x) * silu(gate) if `norm_before_gate`, else norm(x * silu(gate)); norms over groups of `group_size`.

    Args:
        x, gate: [T, D], last dimension contiguous. weight: [D] float32.

    Returns:
        [T, D] in x's dtype; float32 inside.

    Raises:
        ConfigError: D is no multiple of `group_size`.
    """
    if x.shape[-1] % group_size:
        raise ConfigError(f"gated norm: group_size {group_size} does not divide {x.shape[-1]} channels")
    out: Tensor = select("gated_rms_norm", x.device.type)(
        x, gate, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate
    )
    return out


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool
) -> Tensor:
    """Plain-torch `gated_rms_norm`."""
    gating = F.silu(gate.float())
    h = x.float() if norm_before_gate else x.float() * gating
    h = F.rms_norm(h.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight
    return (h * gating if norm_before_gate else h).to(x.dtype)
