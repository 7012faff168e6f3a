"""Running sums of log decays in float64, with exact differences.

Token j has decayed at token i by exp(G_i - G_j), where G is the running sum of gates. In float32 a
strong gate before j makes the difference inexact, and -inf makes it NaN: so gates are clamped to
FLOOR.
"""

import torch
from torch import Tensor

FLOOR = -128.0  # its exponential is 0 in float32


def decay_sums(gates: Tensor, dim: int) -> Tensor:
    """Running sums of gates along `dim`, float64. Take differences first, then `exp_of`."""
    return gates.clamp(min=FLOOR).double().cumsum(dim)


def exp_of(sums: Tensor) -> Tensor:
    """exp(sums) of sums or of their differences, float32: the share of a token that is left."""
    return sums.float().exp_()


def finite_rates(A: Tensor) -> Tensor:
    """A with -inf replaced by the lowest number: padding has a time step of 0, and 0 * -inf is
    NaN."""
    return A.clamp(min=torch.finfo(A.dtype).min)
