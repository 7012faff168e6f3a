"""Weights in the forms of checkpoints: packed codes and scales to numbers, and to a QuantWeight.

A matrix is [out, in]. The tests of kernels make their weights with it, and those of
`hybridrt.kernels.quant.formats` compare its functions with loops over single numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.quant.formats import (
    AWQ_ORDER,
    decode_e2m1,
    expand_blocks,
    gptq_zeros,
    scale_values,
    unpack_awq,
    unpack_int32,
    unpack_pairs,
)
from hybridrt.kernels.quant.quant_weight import QuantWeight, pack_planes


class GroupCodes(NamedTuple):
    """An integer matrix, w = (codes - zero) * scale.

    Attributes:
        codes: uint8 [out, in].
        scale: [out, groups], any float dtype.
        zero: int16 [out, groups].
        group: inputs of a group; the last one may be partial.
        group_of: int64 [in], the group of each input, if it is not input // group.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group: int
    group_of: Tensor | None = None


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_int32`. The last word is filled with zeros."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (codes << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def pack_awq(codes: Tensor) -> Tensor:
    """int32 [rows, out / 8] of uint8 codes [rows, out] in AWQ's order."""
    return pack_int32(codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4)


def codes_of_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> GroupCodes:
    """AWQ's "gemm" layout: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales
    [groups, out]. A group of -1 is a whole row, here and below."""
    codes, zero = unpack_awq(qweight), unpack_awq(qzeros)
    return GroupCodes(
        codes.t().contiguous(), scales.t().contiguous(), zero.t().short().contiguous(), _length(group, codes.shape[0])
    )


def codes_of_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, bits: int, group: int, g_idx: Tensor | None = None,
    v1: bool = True,
) -> GroupCodes:  # fmt: skip
    """GPTQ: qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales
    [groups, out], g_idx [in]."""
    codes = unpack_int32(qweight.t().contiguous(), bits)
    zero = gptq_zeros(qzeros, bits, v1)[:, : qweight.shape[1]].t().short().contiguous()
    group = _length(group, codes.shape[1])
    return GroupCodes(codes, scales.t().contiguous(), zero, group, _unless_in_order(g_idx, group))


def codes_of_compressed(
    packed: Tensor, scale: Tensor, shape: tuple[int, int], bits: int, group: int, zero: Tensor | None = None,
    g_idx: Tensor | None = None,
) -> GroupCodes:  # fmt: skip
    """compressed-tensors' pack-quantized: int32 [out, ceil(in * bits / 32)] with 2^(bits - 1) added
    to signed codes, scale [out, groups], zero int32 [ceil(out * bits / 32), groups] packed along
    the output."""
    out, width = shape
    codes = unpack_int32(packed, bits)[:, :width].contiguous()
    if zero is None:
        zeros = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int16, device=scale.device)
    else:
        zeros = unpack_int32(zero.t().contiguous(), bits)[:, :out].t().short().contiguous()
    group = _length(group, width)
    return GroupCodes(codes, scale, zeros, group, _unless_in_order(g_idx, group))


def dequantize_codes(matrix: GroupCodes) -> Tensor:
    """float32 [out, in]."""
    group_of = matrix.group_of
    if group_of is None:
        group_of = torch.arange(matrix.codes.shape[1], device=matrix.codes.device) // matrix.group
    codes = matrix.codes.float() - matrix.zero.float()[:, group_of]
    return codes * matrix.scale.float()[:, group_of]


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """weight * scale in float32, for e4m3 or int8 weights [out, in].

    scale: [ceil(out / block[0]), ceil(in / block[1])], also as [rows, 1, columns, 1]; without a
        block one number, or one for each row: [out] or [out, 1].
    """
    out, width = weight.shape
    if block is not None:
        return weight.float() * expand_blocks(scale.reshape(-(-out // block[0]), -1), (out, width), block)
    if scale.numel() not in (1, out):
        raise ConfigError(f"a weight of {out} rows has 1 or {out} scales, not {scale.numel()}")
    return weight.float() * scale_values(scale).reshape(-1, 1)


def dequantize_fp4(packed: Tensor, scale: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """decode_e2m1(codes) * scale * factor in float32.

    packed: uint8 [..., out, in / 2], as `unpack_pairs`. scale: [..., out, in / 16] e4m3 (NVFP4), or
    [..., out, in / 32] of exponents (MXFP4). factor: NVFP4's global scale, as a multiplier.
    """
    codes = unpack_pairs(packed)
    group = codes.shape[-1] // scale.shape[-1]
    return decode_e2m1(codes) * (scale_values(scale) * factor).repeat_interleave(group, -1)


def from_codes(matrix: GroupCodes, bits: int) -> QuantWeight:
    """The weight of integer codes of 4 or 8 bits. Raises ConfigError for groups of inputs in another
    order: sort the inputs by group first."""
    if matrix.group_of is not None:
        raise ConfigError("groups of inputs are consecutive here; sort columns and inputs by group")
    middle, width = 1 << (bits - 1), matrix.codes.shape[1]
    zero = None if bool((matrix.zero == middle).all()) else matrix.zero
    block = (1, min(matrix.group, width))
    if bits == 4:
        return QuantWeight(pack_planes(matrix.codes, "int4"), "int4", width, block, matrix.scale, zero)
    data = (matrix.codes.to(torch.int16) - middle).to(torch.int8)
    return QuantWeight(data, "int8", width, block, matrix.scale, None if zero is None else zero - middle)


def from_pairs(packed: Tensor, scale: Tensor, factor: Tensor | None = None) -> QuantWeight:
    """The weight of fp4 bytes uint8 [..., N, K / 2] as checkpoints have them, with scales [..., N, K /
    group] of e4m3 or exponents. factor: [] or [1] for one number, or [..., N]."""
    codes, rows = unpack_pairs(packed), packed.shape[:-1]
    exponents = scale.dtype == torch.float8_e8m0fnu
    if factor is not None:
        factor = factor.float().expand(rows).contiguous()
    block = (1, codes.shape[-1] // scale.shape[-1])
    scale = scale.view(torch.uint8) if exponents else scale
    return QuantWeight(pack_planes(codes, "e2m1"), "e2m1", codes.shape[-1], block, scale, None, factor)


def _length(group: int, width: int) -> int:
    return width if group == -1 else group


def _unless_in_order(g_idx: Tensor | None, group: int) -> Tensor | None:
    """None for input // group, which needs no table."""
    if g_idx is None:
        return None
    in_order = torch.arange(g_idx.shape[0], device=g_idx.device) // group
    return None if torch.equal(g_idx.long(), in_order) else g_idx.long()
