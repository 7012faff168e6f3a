"""Root-mean-square norm (Zhang and Sennrich 2019), alone and behind a residual addition."""

import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.providers import register, select

for _op in ("rms_norm", "add_rms_norm"):
    register(_op, "torch", f"hybridrt.kernels.rms_norm:{_op}_reference")
    register(_op, "triton", f"hybridrt.kernels.rms_norm_triton:{_op}_triton", priority=10)
    register(_op, "flashinfer", f"hybridrt.kernels.libraries.flashinfer:{_op}", priority=5)
    register(_op, "sgl_kernel", f"hybridrt.kernels.libraries.sgl_kernel:{_op}", priority=4)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32.

    x `[..., D]` any float dtype, may be a strided view; weight `[D]` float32 (a zero-centred norm's 1 + w is folded at
    load time). Returns a new tensor of x's shape and dtype.
    """
    normed: Tensor = select("rms_norm", x.device.type)(x, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x `[T, D]`, residual `[T, D]`, weight `[D]` float32.

    The sum is rounded to residual's dtype and overwrites residual, whose tensor is returned; the norm is of the rounded
    sum and comes in x's dtype.
    """
    result: tuple[Tensor, Tensor] = select("add_rms_norm", x.device.type)(x, residual, weight, eps)
    return result


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual.add_(x)
    return F.rms_norm(residual.float(), weight.shape, weight, eps).to(x.dtype), residual
