"""Root-mean-square norm (Zhang and Sennrich 2019), alone and behind a residual addition."""

from functools import cache

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation


@operation(By("triton"), By("flashinfer", priority=5), By("sgl_kernel", priority=4))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32.

    x `[..., D]` any float dtype, may be a strided view; weight `[D]` float32 (a zero-centred norm's 1 + w is folded at
    load time). Returns a new tensor of x's shape and dtype.
    """
    return _normed(x.float(), weight, eps).to(x.dtype)


@operation(By("triton"), By("flashinfer", priority=5), By("sgl_kernel", priority=4))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x `[T, D]`, residual `[T, D]`, weight `[D]` float32.

    The sum is rounded to residual's dtype and overwrites residual, whose tensor is returned; the norm is of the rounded
    sum and comes in x's dtype.
    """
    residual.add_(x)
    return _normed(residual.float(), weight, eps).to(x.dtype), residual


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of x [..., D] float32."""
    if x.device.type == "cpu" and x.numel() == weight.numel() and eps > 0:
        # torch.rms_norm is six operations on a CPU. Of one row, a product adds the mean square to epsilon.
        row = x.reshape(1, -1)
        scale = torch.addmm(_as_tensor(eps), row, row.t(), alpha=1 / row.shape[1]).rsqrt_()
        return torch.mul(x, weight).mul_(scale)
    return torch.rms_norm(x, weight.shape, weight, eps)


@cache
def _as_tensor(eps: float) -> Tensor:
    """[1, 1] float32 on a CPU."""
    return torch.full((1, 1), eps, dtype=torch.float32, device="cpu")
