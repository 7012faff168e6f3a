"""Masks of tiles that several kernels load and store, and the unit of their exponents."""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))  # exp(x) is exp2(LOG2_E * x), one instruction


@triton.jit
def tile_mask(live, column, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Live rows, columns below SIZE. If only whole rows are masked, threads load 16 bytes at a
    time."""
    if SIZE % BLOCK == 0:
        return live[:, None]
    else:
        return live[:, None] & (column < SIZE)[None, :]
