"""Triton kernel of the element-wise activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.pdl_triton import begin, pdl

BLOCK = 1024


@triton.jit
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
    return _launch("silu_and_mul", gate, up)


def clamped_silu_and_mul_triton(x: Tensor, limit: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    return _launch("clamped_silu_and_mul", gate, up, limit)


def relu2_triton(x: Tensor) -> Tensor:
    return _launch("relu2", x, x)


def sigmoid_mul_triton(x: Tensor, gate: Tensor) -> Tensor:
    return _launch("sigmoid_mul", x, gate)


def _launch(op: str, x: Tensor, other: Tensor, limit: float | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = x.shape[-1]
    x, other = x.reshape(-1, inner), other.reshape(-1, other.shape[-1])
    block = min(BLOCK, triton.next_power_of_2(inner))
    _activation_kernel[(x.shape[0], triton.cdiv(inner, block))](
        x, other, out, x.stride(0), other.stride(0), OP=op, LIMIT=limit, INNER=inner,
        RUN=inner // other.shape[1], BLOCK=block, **pdl(x.device),
    )  # fmt: skip
    return out
