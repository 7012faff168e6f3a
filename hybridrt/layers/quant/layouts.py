"""Names and packing of a quantised matrix's tensors in checkpoints, and their normal form.

Normal form: codes by rows of outputs, [out, in] or [out, in / 2] bytes with the even input in the
low half; grids of scales and zero points [row blocks, column blocks].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrt.base.quantization import Scheme
from hybridrt.kernels.quant.decode import CENTRE_OF_INT4
from hybridrt.kernels.quant.formats import E4M3_MAX, gptq_zeros, pack_pairs, unpack_awq, unpack_int32

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
LARGEST = {"fp8": E4M3_MAX, "int8": 255.0, "int4": 15.0, "fp4": 6.0}  # size of a code less its zero point
CENTRES = {"int4": CENTRE_OF_INT4, "int8": 128}  # added to signed codes where they are packed


@dataclass(frozen=True)
class Layout:
    """Last names of a module's tensors.

    Attributes:
        codes: the codes. dtypes: allowed ones, by method.
        scale, zeros, index, shape: scales; zero points; the group of each input; [out, in]. "" if
            there are none.
        factor: one more scale for the whole matrix, which is required. `divides`: it is stored as
            its reciprocal.
        advice: tensors for quantised activations and caches.
        needs: which of the others are required.
    """

    codes: str
    scale: str
    dtypes: dict[str, torch.dtype]
    zeros: str = ""
    index: str = ""
    shape: str = ""
    factor: str = ""
    divides: bool = False
    advice: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        own = (self.codes, self.scale, self.zeros, self.index, self.shape, self.factor)
        return tuple(name for name in (*own, *self.advice) if name)


_E4M3 = {"fp8": torch.float8_e4m3fn}
_WORDS = {"int4": torch.int32, "int8": torch.int32}
_PAIRS = {"fp4": torch.uint8}
LAYOUTS = {
    "fp8": Layout("weight", "weight_scale_inv", _E4M3, advice=("activation_scale", "input_scale")),
    "compressed": Layout(
        "weight", "weight_scale", {**_E4M3, "int8": torch.int8}, zeros="weight_zero_point",
        advice=("input_scale", "input_zero_point"),
    ),
    "compressed-packed": Layout(
        "weight_packed", "weight_scale", _WORDS, zeros="weight_zero_point", index="weight_g_idx", shape="weight_shape",
        advice=("input_scale", "input_zero_point"),
    ),
    "compressed-mxfp4": Layout("weight_packed", "weight_scale", _PAIRS, advice=("input_scale",)),
    "compressed-nvfp4": Layout(
        "weight_packed", "weight_scale", _PAIRS, factor="weight_global_scale", divides=True,
        advice=("input_global_scale",),
    ),
    "mxfp4": Layout("blocks", "scales", _PAIRS),
    "modelopt": Layout("weight", "weight_scale", {**_E4M3, **_PAIRS}, advice=("input_scale",)),
    "modelopt-nvfp4": Layout(
        "weight", "weight_scale", _PAIRS, factor="weight_scale_2", advice=("input_scale",),
    ),
    "awq": Layout("qweight", "scales", {"int4": torch.int32}, zeros="qzeros", needs=("qzeros",)),
    "gptq": Layout("qweight", "scales", _WORDS, zeros="qzeros", index="g_idx", needs=("qzeros",)),
    "gptq_v2": Layout("qweight", "scales", _WORDS, zeros="qzeros", index="g_idx", needs=("qzeros",)),
}  # fmt: skip


def bits_of(scheme: Scheme) -> int:
    """Of a code."""
    return 8 if scheme.method in ("fp8", "int8") else 4


def scale_dtypes(scheme: Scheme) -> Sequence[torch.dtype]:
    """Dtypes that a scheme's scales may have."""
    if scheme.method == "fp4":
        return EXPONENTS if scheme.block == (1, 32) else (torch.float8_e4m3fn,)
    return (*FLOATS, *EXPONENTS) if scheme.method == "fp8" else FLOATS


def whole_rows(scheme: Scheme, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of codes with one dimension for a row. gpt-oss has two: groups, and their bytes."""
    if scheme.layout != "mxfp4":
        return tuple(shape)
    return (*shape[:-2], shape[-2] * shape[-1]) if len(shape) > 2 and shape[-1] == 16 else ()


def outputs_of(scheme: Scheme, shape: Sequence[int]) -> int:
    """Outputs of a matrix by the shape of its codes, without a dimension of experts."""
    if scheme.layout == "awq":
        return shape[1] * 8
    return shape[1] if scheme.layout.startswith("gptq") else shape[0]


def codes_shape(scheme: Scheme, outputs: int, inputs: int) -> tuple[int, int]:
    """The shape of the codes of [outputs, inputs] in the checkpoint."""
    bits = bits_of(scheme)
    if scheme.layout == "awq":
        return inputs, outputs // 8
    if scheme.layout.startswith("gptq"):
        return inputs * bits // 32, outputs
    if scheme.layout == "compressed-packed":
        return outputs, -(-inputs * bits // 32)
    return outputs, inputs if bits == 8 else -(-inputs // 2)


def normal_codes(scheme: Scheme, stored: Tensor, inputs: int) -> Tensor:
    """A checkpoint's codes, 2-D, in the normal form: e4m3 or int8 [out, in], or uint8 pairs."""
    if scheme.layout == "awq":
        return pack_pairs(unpack_awq(stored).t())
    if scheme.layout.startswith("gptq"):
        stored = stored.t().contiguous()
    if stored.dtype == torch.int32:  # codes are consecutive bits
        stored = stored.contiguous().view(torch.uint8)[:, : stored_width(scheme, inputs)]
        return stored if scheme.method == "int4" else (stored ^ 0x80).view(torch.int8)
    return stored


def stored_width(scheme: Scheme, inputs: int) -> int:
    """Elements of a row of codes in the normal form: 8-bit codes, or bytes of two."""
    return inputs if bits_of(scheme) == 8 else -(-inputs // 2)


def normal_zeros(scheme: Scheme, stored: Tensor, outputs: int) -> Tensor:
    """A checkpoint's zero points as int8 [out, groups], less the centre of the codes."""
    if scheme.layout == "compressed":
        return stored
    bits = bits_of(scheme)
    if scheme.layout == "awq":
        codes = unpack_awq(stored)
    elif scheme.layout == "compressed-packed":
        codes = unpack_int32(stored.t().contiguous(), bits)[:, :outputs]
    else:
        codes = gptq_zeros(stored, bits, v1=scheme.layout == "gptq")[:, :outputs]
    return (codes.t().short() - CENTRES[scheme.method]).to(torch.int8)


def zeros_shape(scheme: Scheme, grid: tuple[int, int], outputs: int) -> tuple[int, ...]:
    """The shape of zero points in the checkpoint, for a grid of scales."""
    bits = bits_of(scheme)
    if scheme.layout == "compressed":
        return grid
    words = -(-outputs * bits // 32)
    return (words, grid[1]) if scheme.layout == "compressed-packed" else (grid[1], words)


def normal_scales(scheme: Scheme, stored: Tensor, grid: tuple[int, int]) -> Tensor | None:
    """A checkpoint's scales as their grid; None if they have another shape. Exponents are e8m0."""
    if scheme.layout in ("awq", "gptq", "gptq_v2"):
        stored = stored.t() if stored.dim() == 2 else stored
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    rows, columns = grid
    known = [grid, (rows, 1, columns, 1)]
    known += [(rows,), (rows, 1, 1)] if columns == 1 else []
    known += [()] if grid == (1, 1) else []
    return stored.reshape(grid) if tuple(stored.shape) in known else None
