"""Running sums of the logs of decays, whose differences are exact whatever comes before them.

What is left of token j at token i is exp(G_i - G_j), G the running sum of gates from 0 to -inf. In float32 the
difference loses what a strong gate before j has rounded off both sums, and -inf leaves NaN. So no gate counts for more
than FLOOR, and sums are float64: a difference of two is as exact as a sum of the gates between alone.
"""

import torch
from torch import Tensor

FLOOR = -128.0  # the exponential of it, and of all that is lower, is 0 in float32


def decay_sums(gates: Tensor, dim: int) -> Tensor:
    """Running sums of gates along `dim`, float64. Take differences first, then `left`."""
    return gates.clamp(min=FLOOR).double().cumsum(dim)


def left(sums: Tensor) -> Tensor:
    """exp of sums, or of differences of them, float32."""
    return sums.float().exp_()


def finite_rates(A: Tensor) -> Tensor:
    """A, the lowest number in the place of -inf: a place without a token has a time step of 0, and no decay."""
    return A.clamp(min=torch.finfo(A.dtype).min)
