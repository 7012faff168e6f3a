"""Keys and values as e4m3 codes with one scale for each layer: the reference.

A code is x / scale, rounded to the nearest e4m3 number (ties to even). Numbers beyond 448 * scale
saturate. NaN stays NaN, and infinities become NaN, so that the request fails as it does with plain
numbers. Kernels multiply codes by queries and weights, and apply the scales to scores and sums.
"""

import math
from functools import cache

import torch
from torch import Tensor

from hybridrt.kernels.quant.formats import E4M3_MAX


def encode(x: Tensor, scale: float) -> Tensor:
    """float8_e4m3fn codes of x / scale."""
    scaled = x.float() * (1.0 / scale)
    inside = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(scaled.abs() < math.inf, inside, math.nan).to(torch.float8_e4m3fn)


def numbers(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries of a cache in `dtype`. Codes are not multiplied by their scale."""
    if cells.dtype != torch.float8_e4m3fn or cells.device.type != "cpu" or cells.shape[-1] % 2:
        return cells.to(dtype)
    # Two codes at a time: torch's conversion takes four times as long.
    pairs = cells.contiguous().view(torch.uint16).flatten().to(torch.int32)
    return _pairs().index_select(0, pairs).view(torch.float32).view(cells.shape).to(dtype)


@cache
def _pairs() -> Tensor:
    """[65536]: the float32 numbers of two codes, in the bytes of a float64."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.stack((every.repeat(256), every.repeat_interleave(256)), -1).view(torch.float64).flatten()


def as_bytes(cells: Tensor) -> Tensor:
    """A view of codes as bytes, because torch moves no float8 on a CPU; plain numbers as they are."""
    return cells.view(torch.uint8) if cells.dtype == torch.float8_e4m3fn else cells
