"""The running sums of `decay_sums.py` in Triton kernels, which have no time for float64.

A gate g is cut into a multiple of a unit and a rest of half a unit at most. Sums of multiples stay within 2^24 units.
So they are exact in float32, and so are their differences. The rests stay small, and so does what their sums lose:

    exp(G_i - G_j) = exp(M_i - M_j) exp(R_i) / exp(R_j)

The last two are factors of tokens, not of pairs, and go where a pair's other factors are. With SIZE tokens and the
unit 2^-17 SIZE, the sum of rests is at most 2^-18 SIZE^2: 1/64 of 64 tokens, 1/4 of 256.
"""

import triton
import triton.language as tl

from hybridrt.kernels.core import decay_sums

FLOOR = tl.constexpr(decay_sums.FLOOR)
LOWEST_RATE = tl.constexpr(-3.4e38)


@triton.jit
def split_gates(gates, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiples of the unit of SIZE tokens, and rests. NaN stays NaN."""
    UNIT: tl.constexpr = SIZE * 2.0**-17
    gates = tl.where(gates < FLOOR, FLOOR, gates.to(tl.float32))
    whole = tl.floor(gates * (1.0 / UNIT) + 0.5) * UNIT
    return whole, gates - whole


@triton.jit
def finite_rate(A):  # type: ignore[no-untyped-def]
    """A, or where it is -inf a number of which 0 times is 0: places without a token have time steps of 0."""
    return tl.where(A < LOWEST_RATE, LOWEST_RATE, A)
