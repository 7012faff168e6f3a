"""Triton kernels of the RMS norm, alone and after a residual addition, and of the activations."""

import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl


@jit_kernel
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
    out = x.new_empty(x.shape)
    _launch_norm(x.reshape(-1, x.shape[-1]), None, weight, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    _launch_norm(x, residual, weight, out, eps)
    return out, residual


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    rows, width = x.shape
    block = next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, residual, weight, out, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        D=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **pdl(x.device),
    )  # fmt: skip


BLOCK = 1024


@jit_kernel
def _activation_kernel(  # type: ignore[no-untyped-def]
    x_ptr, other_ptr, out_ptr, x_sr, other_sr,
    OP: tl.constexpr, LIMIT: tl.constexpr, INNER: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows, blocks of INNER]. x [rows, INNER] of row stride x_sr and other [rows, INNER / RUN],
    whose columns are for RUN columns of x each, to out [rows, INNER], contiguous. Computes in
    float32."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < INNER
    begin(PDL)
    x = tl.load(x_ptr + row * x_sr + i, mask=mask, other=0.0).to(tl.float32)
    if OP == "relu2":
        x = tl.maximum(x, 0.0)
        y = x * x
    else:
        column = i if RUN == 1 else i // RUN
        other = tl.load(other_ptr + row * other_sr + column, mask=mask, other=0.0).to(tl.float32)
        if OP == "clamped_silu_and_mul":
            y = tl.minimum(x * tl.sigmoid(x), LIMIT) * tl.maximum(tl.minimum(other, LIMIT), -LIMIT)
        else:
            y = x * tl.sigmoid(x) * other if OP == "silu_and_mul" else x * tl.sigmoid(other)
    tl.store(out_ptr + row * INNER + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_triton(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return _launch_activation("silu_and_mul", gate, up)


def clamped_silu_and_mul_triton(x: Tensor, limit: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    return _launch_activation("clamped_silu_and_mul", gate, up, limit)


def relu2_triton(x: Tensor) -> Tensor:
    return _launch_activation("relu2", x, x)


def sigmoid_mul_triton(x: Tensor, gate: Tensor) -> Tensor:
    return _launch_activation("sigmoid_mul", x, gate)


def _launch_activation(op: str, x: Tensor, other: Tensor, limit: float | None = None) -> Tensor:
    out = x.new_empty(x.shape)
    inner = x.shape[-1]
    x, other = x.reshape(-1, inner), other.reshape(-1, other.shape[-1])
    block = min(BLOCK, next_power_of_2(inner))
    _activation_kernel[(x.shape[0], cdiv(inner, block))](
        x, other, out, x.stride(0), other.stride(0), OP=op, LIMIT=limit, INNER=inner,
        RUN=inner // other.shape[1], BLOCK=block, **pdl(x.device),
    )  # fmt: skip
    return out
