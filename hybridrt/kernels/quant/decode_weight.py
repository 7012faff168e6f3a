"""The numbers of a weight of 8 or 4 bits, for products of many tokens."""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.quant.quant_weight import QuantWeight, dequantize


@operation(By("triton"))
def decode_weight(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """`dequantize(weight)` [N, K], rounded to `dtype` once."""
    return dequantize(weight).to(dtype)
