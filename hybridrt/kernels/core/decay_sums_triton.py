"""Running sums of log decays in Triton, exact without float64.

A gate is split into a multiple of a unit and a rest of at most half a unit. Sums of multiples stay
within 2^24 units and are exact in float32; sums of rests are small, and so are their errors:

    exp(G_i - G_j) = exp(M_i - M_j) exp(R_i) / exp(R_j)

The last two factors belong to a token, not to a pair. With the unit 2^-17 SIZE, rests of SIZE
tokens sum to at most 2^-18 SIZE^2.
"""

import triton
import triton.language as tl

from hybridrt.kernels.core import chunk_plan

FLOOR = tl.constexpr(chunk_plan.FLOOR)
LOWEST_RATE = tl.constexpr(-3.4e38)


@triton.jit
def split_gates(gates, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiples of the unit, and rests. NaN stays NaN."""
    UNIT: tl.constexpr = SIZE * 2.0**-17
    gates = tl.where(gates < FLOOR, FLOOR, gates.to(tl.float32))
    whole = tl.floor(gates * (1.0 / UNIT) + 0.5) * UNIT
    return whole, gates - whole


@triton.jit
def finite_rate(A):  # type: ignore[no-untyped-def]
    """A with -inf replaced by a finite number: padding has a time step of 0, and 0 * -inf is
    NaN."""
    return tl.where(A < LOWEST_RATE, LOWEST_RATE, A)
