"""Triton kernel of `gated_rms_norm`: one program per token and group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.gated_norm import GateActivation
from hybridrt.kernels.mamba2_common_triton import silu
from hybridrt.kernels.pdl_triton import begin, pdl


@triton.jit
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_st: tl.constexpr, gate_st: tl.constexpr, eps,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < GROUP
    d = tl.program_id(1) * GROUP + i
    h = tl.load(x_ptr + token * x_st + d, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_st + d, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate) if SIGMOID else silu(gate)
    if not NORM_FIRST:
        h *= gate
    h *= tl.rsqrt(tl.sum(h * h, axis=0) / GROUP + eps) * tl.load(weight_ptr + d, mask=mask, other=0.0)
    if NORM_FIRST:
        h *= gate
    tl.store(out_ptr + token * D + d, h.to(out_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool,
    activation: GateActivation = "silu",
) -> Tensor:  # fmt: skip
    """Triton `gated_rms_norm`."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens:
        block = triton.next_power_of_2(group_size)
        _gated_norm_kernel[tokens, channels // group_size](
            x, gate, weight, out, x.stride(0), gate.stride(0), eps,
            D=channels, GROUP=group_size, BLOCK=block, NORM_FIRST=norm_before_gate, SIGMOID=activation == "sigmoid",
            num_warps=min(8, max(1, block // 512)), **pdl(x.device),
        )  # fmt: skip
    return out
