"""RMS norm (Zhang and Sennrich 2019), alone and after a residual addition, and element-wise activations."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation


@operation(By("triton"), By("flashinfer", priority=5), By("sgl_kernel", priority=4))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32.

    x `[..., D]` of any float dtype and stride; weight `[D]` float32 (1 + w of zero-centred norms,
    folded at load time). Returns a new tensor of x's shape and dtype.
    """
    return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


@operation(By("triton"), By("flashinfer", priority=5), By("sgl_kernel", priority=4))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x, residual `[T, D]`, weight `[D]` float32.

    The sum is rounded to residual's dtype and overwrites residual, which is returned. The norm is
    of the rounded sum, in x's dtype.
    """
    residual.add_(x)
    return torch.rms_norm(residual.float(), weight.shape, weight, eps).to(x.dtype), residual


@operation(By("triton"), By("flashinfer", priority=5), By("sgl_kernel", priority=4))
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up. x `[..., 2I]` holds gate, then up. `[..., I]` in x's
    dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@operation(By("triton"))
def clamped_silu_and_mul(x: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) * clamp(up, -limit, limit), otherwise `silu_and_mul` (Ling 3)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


def biased_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:
    """g * sigmoid(alpha * g) * (u + 1) of g = min(gate, limit) and u = clamp(up, -limit, limit)
    (gpt-oss), otherwise `silu_and_mul`. Only experts compute it, in their kernel."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


@operation(By("triton"))
def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021), any shape and float dtype."""
    return torch.relu(x).square_()


@operation(By("triton"))
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), `[..., D]` by `[..., G]`. G divides D: each gate is for D / G neighbouring
    columns, such as a head. Returns x's dtype."""
    if gate.shape == x.shape:
        return x * torch.sigmoid(gate)
    runs = x.unflatten(-1, (gate.shape[-1], -1))
    return (runs * torch.sigmoid(gate).unsqueeze(-1)).flatten(-2)
