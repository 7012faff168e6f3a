"""Number formats of quantised checkpoints, in plain torch: packed integers, fp4, e8m0, block scales.

A matrix is [out, in]. Sources: OCP Microscaling Formats 1.0 (e2m1, e8m0), OCP FP8 (e4m3), and the
files that AutoAWQ, GPTQModel, compressed-tensors and NVIDIA ModelOpt write.
"""

import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between neighbours of E2M1_VALUES.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WORD_BITS = (4, 8)


def unpack_int32(words: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., W * 32 / bits] of int32 words [..., W]: code j at bits j * bits.

    Raises ConfigError for other widths than 4 and 8 bits."""
    shifts = torch.arange(0, 32, _word_bits(bits), dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def unpack_awq(words: Tensor) -> Tensor:
    """uint8 codes [rows, out] of int32 words [rows, out / 8] in AWQ's order: nibble k of a word is
    for output AWQ_ORDER[k] of eight."""
    places = [AWQ_ORDER.index(i) for i in range(8)]
    return unpack_int32(words, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2)


def gptq_zeros(words: Tensor, bits: int, v1: bool) -> Tensor:
    """uint8 zero points [groups, out] of int32 words [groups, out * bits / 32].

    v1 files store zero - 1, subtracted from whole words: a field of zero borrows from the next.
    """
    if v1:
        ones = sum(1 << shift for shift in range(0, 32, _word_bits(bits)))
        words = (words.long() + ones).bitwise_and(0xFFFFFFFF)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return unpack_int32(words, bits)


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


def _word_bits(bits: int) -> int:
    if bits not in WORD_BITS:
        raise ConfigError(f"packed integers have 4 or 8 bits, not {bits}")
    return bits
