"""Plain matrices to codes and scales: e4m3 by blocks, four-bit integers and fp4 by groups of inputs.

A matrix is [out, in]. It is encoded by blocks of rows, so that no float32 copy of it exists.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hybridrt.kernels.quant.formats import E2M1_VALUES, E4M3_MAX, encode_e2m1, pack_pairs

NUMBERS = 1 << 20  # that are encoded at once
LARGEST_E2M1, LARGEST_INT4 = E2M1_VALUES[-1], 7
# A scale is a group's largest size over one of these: the one with the least square error. Scales that clip the largest
# number make the others more exact.
DIVISORS_INT4 = tuple(7 + 0.5 * i for i in range(9))
DIVISORS_E2M1 = (6.0, 4.0)  # Cook et al. 2025, arXiv:2512.02010


def encode_fp8(matrix: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """e4m3 [out, in] and float32 scales [ceil(out / block), ceil(in / block)], which multiply."""
    out, width = matrix.shape
    codes = torch.empty(out, width, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(-(-out // block), -(-width // block), device=matrix.device)
    for start, end in _rows(out, width, block):
        missing = (0, -width % block, 0, -(end - start) % block)
        numbers = matrix[start:end].float()
        numbers = torch.nn.functional.pad(numbers, missing) if any(missing) else numbers
        blocks = numbers.unflatten(0, (-1, block)).unflatten(2, (-1, block))
        found = _without_zeros(_largest(blocks, (1, 3)) / E4M3_MAX)
        scaled = (blocks / found).clamp_(-E4M3_MAX, E4M3_MAX).flatten(2).flatten(0, 1)
        codes[start:end] = scaled[: end - start, :width].to(torch.float8_e4m3fn)
        scales[start // block : -(-end // block)] = found[:, 0, :, 0]
    return codes, scales


def encode_int4(matrix: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Pairs of codes, uint8 [out, in / 2], 8 for zero, and bfloat16 scales [out, in / group]. `group`
    divides the inputs."""
    out, width = matrix.shape
    codes = torch.empty(out, width // 2, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(out, width // group, dtype=torch.bfloat16, device=matrix.device)

    def rounded(numbers: Tensor, scale: Tensor) -> Tensor:
        return (numbers / scale).round_().clamp_(-LARGEST_INT4 - 1, LARGEST_INT4)

    def scale_of(size: Tensor) -> Tensor:
        return _without_zeros(size).to(torch.bfloat16).float()

    for start, end in _rows(out, width, 1):
        numbers = matrix[start:end].float().unflatten(1, (-1, group))
        found = _best_scales(numbers, DIVISORS_INT4, scale_of, lambda x, scale: rounded(x, scale).mul_(scale))
        scales[start:end] = found.squeeze(-1)
        codes[start:end] = pack_pairs((rounded(numbers, found) + (LARGEST_INT4 + 1)).to(torch.uint8).flatten(1))
    return codes, scales


def encode_nvfp4(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of e2m1 codes, uint8 [out, in / 2]; e4m3 scales [out, in / group]; and a float32 number,
    [1], that divides all of them. `group` divides the inputs."""
    out, width = matrix.shape
    codes = torch.empty(out, width // 2, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(out, width // group, dtype=torch.float8_e4m3fn, device=matrix.device)
    largest = _largest(matrix, (0, 1)).float().flatten()
    divisor = E4M3_MAX * LARGEST_E2M1 / largest if largest > 0 else torch.ones_like(largest)

    def scale_of(size: Tensor) -> Tensor:
        stored = (size * divisor).clamp_(2.0**-9, E4M3_MAX).to(torch.float8_e4m3fn)
        return stored.float() / divisor

    def rounded(numbers: Tensor, scale: Tensor) -> Tensor:
        codes = numbers / scale
        step = torch.where(codes.abs() < 2, 0.5, torch.where(codes.abs() < 4, 1.0, 2.0))
        return (codes / step).round_().mul_(step).clamp_(-LARGEST_E2M1, LARGEST_E2M1) * scale

    for start, end in _rows(out, width, 1):
        numbers = matrix[start:end].float().unflatten(1, (-1, group))
        found = _best_scales(numbers, DIVISORS_E2M1, scale_of, rounded)
        scales[start:end] = (found.squeeze(-1) * divisor).to(torch.float8_e4m3fn)
        codes[start:end] = pack_pairs(encode_e2m1(numbers / found).flatten(1))
    return codes, scales, divisor


def _best_scales(
    numbers: Tensor, divisors: tuple[float, ...], scale_of: Callable[[Tensor], Tensor],
    decoded: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """float32 [..., 1]: of each group [..., n] the scale with the least square error."""
    size = _largest(numbers, (-1,))
    best, least = scale_of(size / divisors[0]), torch.full_like(size, torch.inf)
    for divisor in divisors:
        scale = scale_of(size / divisor)
        error = decoded(numbers, scale).sub_(numbers).square_().sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best


def _largest(numbers: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest size along dimensions, which stay with length 1. Makes no copy of all numbers."""
    return torch.maximum(numbers.amax(dims, keepdim=True), -numbers.amin(dims, keepdim=True))


def _rows(out: int, width: int, block: int) -> Iterator[tuple[int, int]]:
    step = max(NUMBERS // width // block, 1) * block
    return ((start, min(start + step, out)) for start in range(0, out, step))


def _without_zeros(scales: Tensor) -> Tensor:
    """1 for a block of zeros: a scale of zero is a mark of damage."""
    return torch.where(scales == 0, 1.0, scales)
