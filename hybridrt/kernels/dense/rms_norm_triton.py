"""Triton kernel of the RMS norm, alone and after a residual addition; a program computes a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.pdl_triton import begin, pdl


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_sr, residual_sr, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    begin(PDL)
    x = tl.load(x_ptr + row * x_sr + d, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        target = residual_ptr + row * residual_sr + d
        rounded = (x + tl.load(target, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(target, rounded, mask=mask)
        x = rounded.to(tl.float32)
    out = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)) * weight
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.reshape(-1, x.shape[-1]), None, weight, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out, residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        D=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **pdl(x.device),
    )  # fmt: skip
