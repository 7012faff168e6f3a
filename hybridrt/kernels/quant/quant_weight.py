"""QuantWeight: a weight of 8 or 4 bits in the layout that products read.

Four 4-bit codes are stored in a word of 16 bits. 32 columns fill 8 neighbouring words, 16 bytes: the
load of one thread. Code i of word h of such a run is column 8i + h, so one mask takes codes of
neighbouring columns out of neighbouring words. BITS says which bits of a word are code i.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.quant.formats import decode_e2m1, expand_blocks

Code = Literal["e4m3", "int8", "int4", "e2m1"]
STORED = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.int32, "e2m1": torch.int32}
RUN, PLANES, CODES_OF_INT32 = 32, 4, 8  # columns of a run, codes of a word
# Bits of a word that hold bits 0 to 3 of the code of each plane. e2m1: shifted left by 0, 3 or 6, a code lies where
# bfloat16 has its sign, the low bits of its exponent and the high bit of its mantissa.
BITS = {
    "int4": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    "e2m1": ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14)),
}


class QuantWeight(NamedTuple):
    """w[n, k] = (code[n, k] - zero[n // rows, k // columns]) * scale[n // rows, k // columns] * factor[n].

    A stack of experts has one more dimension, [E, ...], in all tensors.

    Attributes:
        data: e4m3 or int8 [N, K]; for 4 bits int32 [N, ceil(K / 32) * 4] of `pack_planes`.
        code: of numbers. "int4" and "int8" are integers, "int4" 0 to 15.
        width: K.
        block: rows and columns that share a scale.
        scale: [ceil(N / rows), ceil(K / columns)] of a float dtype, or uint8 exponents (e8m0). None
            for 1.
        zero: [ceil(N / rows), ceil(K / columns)] int16, of integer codes. None for 8 of "int4", else
            for 0.
        factor: [N] float32: scales of rows or of a whole matrix. None for 1.
    """

    data: Tensor
    code: Code
    width: int
    block: tuple[int, int] = (1, 1)
    scale: Tensor | None = None
    zero: Tensor | None = None
    factor: Tensor | None = None

    @property
    def rows(self) -> int:
        """N."""
        return self.data.shape[-2]


def expert_of(stack: QuantWeight, expert: int) -> QuantWeight:
    """One weight of a stack."""
    scale, zero, factor = (None if t is None else t[expert] for t in (stack.scale, stack.zero, stack.factor))
    return stack._replace(data=stack.data[expert], scale=scale, zero=zero, factor=factor)


def check_weight(weight: QuantWeight) -> None:
    """Raises ConfigError if the tensors of a weight do not fit together."""
    if weight.data.dtype != STORED[weight.code]:
        raise ConfigError(f"{weight.code} codes are stored as {STORED[weight.code]}, not {weight.data.dtype}")
    numbers = weight.width if weight.code in ("e4m3", "int8") else packed_words(weight.width)
    if weight.data.shape[-1] != numbers:
        raise ConfigError(f"{weight.width} {weight.code} columns are {numbers} numbers, not {weight.data.shape[-1]}")
    if numbers % 4:
        raise ConfigError(f"a weight of 8 bits has a multiple of 4 columns, not {weight.width}")
    columns = weight.block[1]
    if (
        (weight.scale is not None or weight.zero is not None)
        and columns != 16
        and columns % RUN
        and columns < weight.width
    ):
        raise ConfigError(f"blocks have 16 columns or a multiple of {RUN}, not {columns}")
    grid = [-(-size // step) for size, step in zip((weight.rows, weight.width), weight.block, strict=True)]
    for name, tensor in (("scale", weight.scale), ("zero", weight.zero)):
        if tensor is not None and list(tensor.shape[-2:]) != grid:
            raise ConfigError(f"the {name} of blocks {list(weight.block)} is {grid}, not {list(tensor.shape[-2:])}")
    if weight.zero is not None and weight.zero.dtype != torch.int16:
        raise ConfigError(f"zero points are int16, not {weight.zero.dtype}")
    if weight.factor is not None and weight.factor.shape[-1] != weight.rows:
        raise ConfigError(f"a factor has one number for each of {weight.rows} rows, not {weight.factor.shape[-1]}")


def packed_words(width: int) -> int:
    """int32 words of `width` 4-bit codes: whole runs."""
    return -(-width // RUN) * (RUN // CODES_OF_INT32)


def pack_planes(codes: Tensor, code: Code) -> Tensor:
    """int32 [..., packed_words(K)], two words each, of 4-bit codes, uint8 [..., K]. Columns past K have
    code 0."""
    runs = F.pad(codes, (0, -codes.shape[-1] % RUN)).unflatten(-1, (-1, PLANES, RUN // PLANES))
    words = torch.zeros(runs[..., 0, :].shape, dtype=torch.int32, device=codes.device)
    for plane, table in enumerate(_words_of(code).to(codes.device)):
        own = runs[..., plane, :]
        words |= table.index_select(0, own.flatten().int()).view(own.shape)
    pairs = words[..., 0::2] | (words[..., 1::2] << 16)
    return pairs.flatten(-2)


@cache
def _words_of(code: Code) -> Tensor:
    """int32 [PLANES, 16]: each code's bits of a word, by plane."""
    words = [[sum((c >> i & 1) << bit for i, bit in enumerate(bits)) for c in range(16)] for bits in BITS[code]]
    return torch.tensor(words, dtype=torch.int32, device="cpu")


def unpack_planes(words: Tensor, code: Code, width: int) -> Tensor:
    """uint8 codes [..., K] of `pack_planes`."""
    runs = words.contiguous().view(torch.int16).unflatten(-1, (-1, 1, RUN // PLANES)).to(torch.int32)
    planes = [sum((runs >> bit & 1) << i for i, bit in enumerate(bits)) for bits in BITS[code]]
    return torch.cat(planes, -2).flatten(-3)[..., :width].to(torch.uint8)


def dequantize(weight: QuantWeight) -> Tensor:
    """float32 [..., N, K]."""
    if weight.code in ("e4m3", "int8"):
        numbers = weight.data.float()
    else:
        codes = unpack_planes(weight.data, weight.code, weight.width)
        numbers = decode_e2m1(codes) if weight.code == "e2m1" else codes.float()
    shape = (weight.rows, weight.width)
    if weight.zero is not None:
        numbers = numbers - expand_blocks(weight.zero, shape, weight.block)
    elif weight.code == "int4":
        numbers = numbers - 8
    if weight.scale is not None:
        numbers = numbers * expand_blocks(weight.scale, shape, weight.block)
    return numbers if weight.factor is None else numbers * weight.factor.unsqueeze(-1)
