"""Number formats of quantised checkpoints, in plain torch: packed integers, fp4, e8m0, block scales.

A matrix is [out, in]. Sources: OCP Microscaling Formats 1.0 (e2m1, e8m0), OCP FP8 (e4m3), and the
files that AutoAWQ, GPTQModel, compressed-tensors and NVIDIA ModelOpt write.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between neighbours of E2M1_VALUES.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_BITS = (4, 8)


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


def unpack_int32(words: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., W * 32 / bits] of int32 words [..., W]: code j at bits j * bits.

    Raises ConfigError for other widths than 4 and 8 bits."""
    shifts = torch.arange(0, 32, _word_bits(bits), dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_int32`. The last word is filled with zeros."""
    per_word = 32 // _word_bits(bits)
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (codes << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def codes_of_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> GroupCodes:
    """AWQ's "gemm" layout: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales
    [groups, out]. Nibble k of a word is for output AWQ_ORDER[k] of eight. A group of -1 is a whole
    row, here and below."""
    codes, zero = unpack_awq(qweight), unpack_awq(qzeros)
    return GroupCodes(
        codes.t().contiguous(), scales.t().contiguous(), zero.t().short().contiguous(), _length(group, codes.shape[0])
    )


def unpack_awq(words: Tensor) -> Tensor:
    """uint8 codes [rows, out] of int32 words [rows, out / 8] in AWQ's order."""
    places = [AWQ_ORDER.index(i) for i in range(8)]
    return unpack_int32(words, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2)


def pack_awq(codes: Tensor) -> Tensor:
    """int32 [rows, out / 8] of uint8 codes [rows, out] in AWQ's order."""
    return pack_int32(codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2), 4)


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


def gptq_zeros(words: Tensor, bits: int, v1: bool) -> Tensor:
    """uint8 zero points [groups, out] of int32 words [groups, out * bits / 32].

    v1 files store zero - 1, subtracted from whole words: a field of zero borrows from the next.
    """
    if v1:
        ones = sum(1 << shift for shift in range(0, 32, _word_bits(bits)))
        words = (words.long() + ones).bitwise_and(0xFFFFFFFF)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return unpack_int32(words, bits)


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


def unpack_pairs(packed: Tensor) -> Tensor:
    """uint8 codes [..., 2n] of bytes [..., n]: the even input in the low nibble."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def pack_pairs(codes: Tensor) -> Tensor:
    """Inverse of `unpack_pairs`, for an even number of codes."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values of codes 0..15: bit 3 is the sign."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return torch.cat((values, -values))[codes.long()]


def encode_e2m1(values: Tensor) -> Tensor:
    """Codes of the nearest values, uint8. Ties go to the even code; large values saturate at 6."""
    size, middles = values.abs(), torch.tensor(_E2M1_MIDDLES, dtype=values.dtype, device=values.device)
    # A tie is a middle: the odd ones round up, to an even code.
    code = torch.bucketize(size, middles)
    tie = code.clamp(max=len(_E2M1_MIDDLES) - 1)
    code += (size == middles[tie]) & (tie % 2 == 1)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """2^(byte - 127) in float32; 255 is NaN. exponents: uint8 or float8_e8m0fnu."""
    exponents = exponents.view(torch.uint8)
    powers = torch.exp2(exponents.double() - 127).float()
    return powers.masked_fill(exponents == 255, torch.nan)


def scale_values(scale: Tensor) -> Tensor:
    """Scales in float32: uint8 and float8_e8m0fnu are exponents, all others numbers."""
    return decode_e8m0(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()


def expand_blocks(scale: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """float32 [..., out, in] with a scale for each number. scale `[..., ceil(out / block[0]), ceil(in /
    block[1])]`; the last blocks may be partial.

    Raises ConfigError if the grid has another size."""
    grid = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    if tuple(scale.shape[-2:]) != grid:
        raise ConfigError(
            f"a {list(shape)} weight in {list(block)} blocks has {list(grid)} scales, not {[*scale.shape]}"
        )
    tall = scale_values(scale).repeat_interleave(block[0], -2)[..., : shape[0], :]
    return tall.repeat_interleave(block[1], -1)[..., : shape[1]]


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


def _word_bits(bits: int) -> int:
    if bits not in WORD_BITS:
        raise ConfigError(f"packed integers have 4 or 8 bits, not {bits}")
    return bits


def _length(group: int, width: int) -> int:
    return width if group == -1 else group


def _unless_in_order(g_idx: Tensor | None, group: int) -> Tensor | None:
    """None for input // group, which needs no table."""
    if g_idx is None:
        return None
    in_order = torch.arange(g_idx.shape[0], device=g_idx.device) // group
    return None if torch.equal(g_idx.long(), in_order) else g_idx.long()
