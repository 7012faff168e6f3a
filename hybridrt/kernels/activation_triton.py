"""Triton kernels of the element-wise activations: a program takes a block of one row."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.pdl_triton import begin, pdl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_sr, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < INNER
    begin(PDL)
    gate = tl.load(x_ptr + row * x_sr + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_sr + INNER + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * INNER + i, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _relu2_kernel(x_ptr, out_ptr, x_sr, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    positive = tl.maximum(tl.load(x_ptr + row * x_sr + i, mask=i < INNER, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + row * INNER + i, (positive * positive).to(out_ptr.dtype.element_ty), mask=i < INNER)


@triton.jit
def _sigmoid_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, out_ptr, x_sr, gate_sr,
    INNER: tl.constexpr, ONE_GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < INNER
    begin(PDL)
    x = tl.load(x_ptr + row * x_sr + i, mask=mask, other=0.0).to(tl.float32)
    if ONE_GATE:
        gate = tl.load(gate_ptr + row * gate_sr).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row * gate_sr + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * INNER + i, (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_triton(x: Tensor) -> Tensor:
    x, out, grid, meta = _rows(x, x.shape[-1] // 2)
    if x.numel():
        _silu_and_mul_kernel[grid](x, out, x.stride(0), **meta)
    return out


def relu2_triton(x: Tensor) -> Tensor:
    x, out, grid, meta = _rows(x, x.shape[-1])
    if x.numel():
        _relu2_kernel[grid](x, out, x.stride(0), **meta)
    return out


def sigmoid_mul_triton(x: Tensor, gate: Tensor) -> Tensor:
    gate = gate.reshape(-1, gate.shape[-1])
    x, out, grid, meta = _rows(x, x.shape[-1])
    if x.numel():
        _sigmoid_mul_kernel[grid](x, gate, out, x.stride(0), gate.stride(0), ONE_GATE=gate.shape[1] == 1, **meta)
    return out


def _rows(x: Tensor, inner: int) -> tuple[Tensor, Tensor, tuple[int, int], dict[str, Any]]:
    """x as rows, an output of `inner` columns in x's shape, the grid over both and the kernel's constants."""
    out = torch.empty(*x.shape[:-1], inner, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    block = min(BLOCK, triton.next_power_of_2(inner))
    return rows, out, (rows.shape[0], triton.cdiv(inner, block)), {"INNER": inner, "BLOCK": block, **pdl(x.device)}
