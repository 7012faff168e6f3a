"""Random weights of 8 and 4 bits, one of each format that checkpoints have."""

from typing import Any

import torch

from hybridrt.kernels.quant.quant_weight import STORED, Code, QuantWeight, check_weight, pack_planes

# Name: code, block (None: no scale), dtype of the scale, zero points, a factor for each row.
FORMATS: dict[str, tuple[Code, tuple[int, int] | None, torch.dtype, bool, bool]] = {
    "fp8 blocks": ("e4m3", (128, 128), torch.float32, False, False),
    "fp8 rows": ("e4m3", None, torch.float32, False, True),
    "mxfp8": ("e4m3", (1, 32), torch.uint8, False, False),
    "int8 zeros": ("int8", (1, 64), torch.float16, True, False),
    "int4": ("int4", (1, 128), torch.bfloat16, False, False),
    "int4 zeros": ("int4", (1, 128), torch.float16, True, False),
    "int4 of 32": ("int4", (1, 32), torch.float16, True, False),
    "nvfp4": ("e2m1", (1, 16), torch.float8_e4m3fn, False, True),
    "mxfp4": ("e2m1", (1, 32), torch.uint8, False, False),
}

# Formats of 4 bits. int4: scales are those of groups of 128 columns, of a block of rows as well, or of rows.
FOUR_BITS = {
    "groups": "int4", "zeros": "int4 zeros", "blocks of 64 rows": "int4", "rows": "int4", "wide groups": "int4 zeros",
    "nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip


def empty_weight(name: str, rows: int, width: int, *lead: int, device: str = "meta") -> QuantWeight:
    """[*lead, rows, width] of a format, not filled."""
    code, block, scale_dtype, zeros, factors = FORMATS[name]
    numbers = width if code in ("e4m3", "int8") else -(-width // 32) * 4

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*lead, *shape, dtype=dtype, device=device)

    grid = (-(-rows // block[0]), -(-width // block[1])) if block else (0, 0)
    scale = empty(*grid, dtype=scale_dtype) if block else None
    zero = empty(*grid, dtype=torch.int16) if zeros else None
    factor = empty(rows, dtype=torch.float32) if factors else None
    return QuantWeight(empty(rows, numbers, dtype=STORED[code]), code, width, block or (1, 1), scale, zero, factor)


def quant_weight(name: str, rows: int, width: int, *lead: int, device: str = "cpu", seed: int = 0) -> QuantWeight:
    """A random weight, numbers of the order of 1 / sqrt(width)."""
    weight = empty_weight(name, rows, width, *lead, device=device)
    any_of: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    shape, code = (*lead, rows, width), weight.code
    if code in ("int4", "e2m1"):
        weight.data.copy_(pack_planes(torch.randint(0, 16, shape, **any_of).to(torch.uint8), code))
    elif code == "int8":
        weight.data.copy_(torch.randint(-128, 128, shape, **any_of))
    else:
        weight.data.copy_((64 * torch.randn(shape, **any_of)).clamp(-448, 448))
    size = {"e4m3": 64.0, "int8": 100.0, "int4": 5.0, "e2m1": 3.0}[code] * width**0.5
    if weight.scale is not None:
        numbers = (0.5 + torch.rand(weight.scale.shape, **any_of)) / (size if weight.factor is None else 1.0)
        exponents = weight.scale.dtype == torch.uint8
        weight.scale.copy_(numbers.log2().round() + 127 if exponents else numbers)
        if weight.scale.dtype == torch.float8_e4m3fn:  # 0, and numbers below the normal ones
            some = weight.scale.view(-1)[:21:7]
            some.copy_(torch.tensor([0.0, 2**-9, 7 * 2**-9])[: len(some)])
    if weight.zero is not None:
        low, high = (0, 16) if code == "int4" else (-40, 40)
        weight.zero.copy_(torch.randint(low, high, weight.zero.shape, **any_of))
    if weight.factor is not None:
        weight.factor.copy_((0.5 + torch.rand(weight.factor.shape, **any_of)) / size)
    check_weight(weight)
    return weight


def four_bit_weight(form: str, rows: int, width: int, device: str) -> QuantWeight:
    """One of FOUR_BITS."""
    weight = quant_weight(FOUR_BITS[form], rows, width, device=device)
    scale, zero = weight.scale, weight.zero
    assert scale is not None
    if form == "blocks of 64 rows":
        return weight._replace(scale=scale[::64].contiguous(), block=(64, 128))
    if form == "rows":
        return weight._replace(scale=None, block=(1, 1), factor=scale[:, 0].float().contiguous())
    if form == "wide groups":
        assert zero is not None
        return weight._replace(scale=scale[:, ::2].contiguous(), zero=zero[:, ::2].contiguous(), block=(1, 256))
    return weight
