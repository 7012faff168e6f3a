"""Products of int4 and int8 weights with bfloat16 inputs on a CPU, by kernels of torch.

Milliseconds of 2048 x 4096 on one busy core with AVX-512 and without bfloat16 instructions:

    tokens                        1     16    256
    int4                        0.5    4.5    390
    int8                        0.5     14    440
    int4, decoded and multiplied 66    150   1170
    int8, decoded and multiplied 27    110   1020
    plain bfloat16              2.5     47    850

With float32 inputs the kernels are slower than all of these: float32 models decode.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridrt.kernels.quant.formats import unpack_pairs
from hybridrt.layers.quant.packed_weight import PackedWeight

GROUPS = (256, 128, 64, 32)  # inputs that share a scale in torch's kernel
ROWS = 16  # outputs are a multiple of them
AT_ONCE = 512  # rows that are stored anew at once


def repack(weight: PackedWeight, dtype: torch.dtype) -> None:
    """Stores int4 codes as torch's kernel takes them, in as many bytes, if it does. Other weights stay as they are, and
    so do those of models in another dtype."""
    size = weight.scheme.block[1] or weight.width
    group = next((each for each in GROUPS if size % each == 0 and weight.width % size == 0), None)
    rows = weight.starts[-1]
    more = -rows % ROWS  # rows of zeros at the end
    if weight.scheme.method != "int4" or dtype != torch.bfloat16 or weight.codes.device.type != "cpu":
        return
    if group is None or weight.column_of is not None:
        return
    grids = torch.zeros(weight.count, weight.width // group, rows + more, 2, dtype=dtype)
    weight.codes.data = F.pad(weight.codes.data, (0, 0, 0, more)) if more else weight.codes.data
    for e in range(weight.count):
        grids[e, :, :rows] = _scales_and_zeros(weight, e, size // group)
        for start in range(0, rows, AT_ONCE):
            part = weight.codes.data[e, start : start + AT_ONCE]
            part.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_pairs(part).to(torch.int32), 1))
    weight.hand_over(nn.Parameter(grids, requires_grad=False))


def _scales_and_zeros(weight: PackedWeight, e: int, repeat: int) -> Tensor:
    """float32 [groups, rows, 2]: (code - 8) * scale + zero."""
    scales, zeros = weight.grids(e)
    zeros = torch.zeros_like(scales) if zeros is None else -zeros * scales
    both = torch.stack((scales, zeros), -1).repeat_interleave(repeat, 1)
    return both.transpose(0, 1).expand(-1, weight.starts[-1], -1)


def product(weight: PackedWeight, x: Tensor, e: int) -> Tensor | None:
    """x W^T [T, out] in x's dtype; None: torch has no fast kernel for the weight and these inputs."""
    if not x.shape[0]:
        return x.new_empty(0, weight.starts[-1])
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return None
    if weight.for_torch is not None:
        grids = weight.for_torch[e]
        group = weight.width // grids.shape[0]
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight.codes[e], group, grids)
        y = y[:, : weight.starts[-1]].contiguous()
        return y if weight.factor is None else y * weight.factor[e].to(y.dtype)
    if weight.scheme.method != "int8" or weight.width % ROWS or weight.starts[-1] % ROWS:
        return None
    scales = weight.row_scales(0, weight.starts[-1], e)
    if scales is None:
        return None
    ones = torch.ones(weight.starts[-1], dtype=x.dtype)
    return torch.mul(torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight.codes[e], ones), scales).to(x.dtype)
