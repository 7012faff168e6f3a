"""QuantWeight: a weight of 8 or 4 bits in the layout that products read.

Four 4-bit codes are stored in an int16 word. 32 columns fill 8 neighbouring words, 16 bytes: the
load of one thread. Nibble i (bits 4i..4i+3) of word h of such a run is column 8i + h. So one mask
takes the codes of neighbouring columns out of neighbouring words, and scales of 16 or 32 columns
are for whole runs of columns.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.quant.formats import decode_e2m1, expand_blocks

Code = Literal["e4m3", "int8", "int4", "e2m1"]
STORED = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.int16, "e2m1": torch.int16}
RUN, PLANES = 32, 4  # columns of a run, codes of a word


class QuantWeight(NamedTuple):
    """w[n, k] = (code[n, k] - zero[n // rows, k // columns]) * scale[n // rows, k // columns] * factor[n].

    A stack of experts has one more dimension, [E, ...], in all tensors.

    Attributes:
        data: e4m3 or int8 [N, K]; for 4 bits int16 [N, ceil(K / 32) * 8] of `pack_planes`.
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


def check_weight(weight: QuantWeight) -> None:
    """Raises ConfigError if the tensors of a weight do not fit together."""
    if weight.data.dtype != STORED[weight.code]:
        raise ConfigError(f"{weight.code} codes are stored as {STORED[weight.code]}, not {weight.data.dtype}")
    words = weight.width if weight.code in ("e4m3", "int8") else -(-weight.width // RUN) * (RUN // PLANES)
    if weight.data.shape[-1] != words:
        raise ConfigError(f"{weight.width} {weight.code} columns are {words} numbers, not {weight.data.shape[-1]}")
    grid = [-(-size // step) for size, step in zip((weight.rows, weight.width), weight.block, strict=True)]
    for name, tensor in (("scale", weight.scale), ("zero", weight.zero)):
        if tensor is not None and list(tensor.shape[-2:]) != grid:
            raise ConfigError(f"the {name} of blocks {list(weight.block)} is {grid}, not {list(tensor.shape[-2:])}")
    if weight.zero is not None and weight.zero.dtype != torch.int16:
        raise ConfigError(f"zero points are int16, not {weight.zero.dtype}")
    if weight.factor is not None and weight.factor.shape[-1] != weight.rows:
        raise ConfigError(f"a factor has one number for each of {weight.rows} rows, not {weight.factor.shape[-1]}")


def pack_planes(codes: Tensor) -> Tensor:
    """int16 [..., ceil(K / 32) * 8] of 4-bit codes, uint8 [..., K]. Columns past K are zeros."""
    runs = F.pad(codes, (0, -codes.shape[-1] % RUN)).unflatten(-1, (-1, PLANES, RUN // PLANES))
    low = runs[..., 0, :] | (runs[..., 1, :] << 4)
    high = runs[..., 2, :] | (runs[..., 3, :] << 4)
    return torch.stack((low, high), -1).flatten(-3).view(torch.int16)


def unpack_planes(words: Tensor, width: int) -> Tensor:
    """uint8 codes [..., K] of `pack_planes`."""
    runs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, RUN // PLANES, 2))
    planes = [(runs[..., byte] >> shift) & 0xF for byte in (0, 1) for shift in (0, 4)]
    return torch.stack(planes, -2).flatten(-3)[..., :width]


def dequantize(weight: QuantWeight) -> Tensor:
    """float32 [..., N, K]."""
    if weight.code in ("e4m3", "int8"):
        numbers = weight.data.float()
    else:
        codes = unpack_planes(weight.data, weight.width)
        numbers = decode_e2m1(codes) if weight.code == "e2m1" else codes.float()
    shape = (weight.rows, weight.width)
    if weight.zero is not None:
        numbers = numbers - expand_blocks(weight.zero, shape, weight.block)
    elif weight.code == "int4":
        numbers = numbers - 8
    if weight.scale is not None:
        numbers = numbers * expand_blocks(weight.scale, shape, weight.block)
    return numbers if weight.factor is None else numbers * weight.factor.unsqueeze(-1)
