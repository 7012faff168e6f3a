"""Triton kernel of `short_conv_update`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.mamba2_common_triton import strides
from hybridrt.kernels.pdl_triton import begin, pdl
from hybridrt.kernels.records import ConvState, ConvWeights


@triton.jit
def _update_kernel(  # type: ignore[no-untyped-def]
    projected_ptr, weight_ptr, bias_ptr, conv_ptr, out_ptr, read_slots_ptr, write_slots_ptr, positions_ptr,
    projected_strides: tl.constexpr, conv_ss: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, WC: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = channel < C
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + b.to(tl.int64) * (T * C) + channel
    read = tl.load(read_slots_ptr + b).to(tl.int64)
    if read < 0:
        for t in range(T):
            tl.store(out + t * C, tl.zeros([BLOCK_C], dtype), mask=mask)
        return

    write = tl.load(write_slots_ptr + b).to(tl.int64)
    position = tl.load(positions_ptr + b)
    tokens = projected_ptr + b.to(tl.int64) * projected_strides[0] + channel
    ring, write_ring = conv_ptr + read * conv_ss + channel * WC, conv_ptr + write * conv_ss + channel * WC
    bias = tl.zeros([BLOCK_C], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for t in range(T):
        y = bias
        for age in tl.static_range(TAPS):
            node = tl.zeros([BLOCK_C], tl.int32) + (t - age)  # -1 is the token before the step's first
            token = tokens + node * projected_strides[1]
            new = mask & (node >= 0)
            into = tl.load(token, mask=new, other=0.0).to(tl.float32)
            x = tl.load(token + 2 * C, mask=new, other=0.0).to(tl.float32)
            product = (into * x).to(dtype)
            if age == 0:
                tl.store(write_ring + ((position + t) & (WC - 1)), product, mask=mask)
            else:
                p = position + node
                old = tl.load(ring + (p & (WC - 1)), mask=mask & (node < 0) & (p >= 0), other=0.0)
                product = tl.where(node >= 0, product, old)
            y += tl.load(weight_ptr + channel * TAPS + TAPS - 1 - age, mask=mask, other=0.0).to(tl.float32) * (
                product.to(tl.float32)
            )
        gate = tl.load(tokens + t * projected_strides[1] + C, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + t * C, (gate * y.to(dtype).to(tl.float32)).to(dtype), mask=mask)
    if read != write:
        for k in tl.static_range(1, TAPS):
            p = position - k + tl.zeros([BLOCK_C], tl.int32)
            old = tl.load(ring + (p & (WC - 1)), mask=mask & (p >= 0), other=0.0)
            tl.store(write_ring + (p & (WC - 1)), old, mask=mask)


def short_conv_update_triton(projected: Tensor, weights: ConvWeights, state: ConvState) -> Tensor:
    """`short_conv_update` in one launch."""
    conv, read_slots, write_slots, start_positions = state
    batch, tokens, width = projected.shape
    out = torch.empty((batch, tokens, width // 3), dtype=projected.dtype, device=projected.device)
    if batch == 0:
        return out
    block_c = 256
    _update_kernel[triton.cdiv(width // 3, block_c), batch](
        projected, weights.weight, weights.bias, conv, out, read_slots, write_slots, start_positions,
        strides(projected), conv.stride(0),
        T=tokens, C=width // 3, TAPS=weights.weight.shape[1], WC=conv.shape[2], BLOCK_C=block_c,
        **pdl(projected.device),
    )  # fmt: skip
    return out
