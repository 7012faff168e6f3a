"""How decode attention shares contexts of different lengths among programs.

A context is cut into parts of about equal length, and a program attends over one part. Parts are as long as the work of
the whole batch asks for: a long context among short ones has many, so that no program is the last one for long, and
equal contexts that fill the device have one each. Each program finds its part by the lengths of all rows, so the host
need not know them: it starts as many programs as there can be parts, and those that find none end at once.
"""

import triton
import triton.language as tl


@triton.jit
def blocks_of(seq_len, T: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """First visible position of T tokens, aligned, and blocks of keys from there: of one row or of several."""
    origin = seq_len * 0
    if WINDOW > 0:
        origin = tl.maximum(seq_len - T - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return origin, tl.cdiv(seq_len - origin, BLOCK_N)


@triton.jit
def parts_of(  # type: ignore[no-untyped-def]
    blocks, share, FEW: tl.constexpr, LEAST: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Blocks of a part, and parts of a row: one at least, also of an empty row. `share`: `parts_of_rows`.

    Parts are at most half a share long, and about equal, so that the last ones take less than a share. They may be
    longer, of LEAST blocks, where there would be more than FEW parts: to join parts takes time. WHOLE: rows of up to
    1.5 shares are not cut.
    """
    part = tl.maximum(tl.cdiv(share, 2), tl.minimum(tl.cdiv(blocks, FEW), LEAST))
    if WHOLE:
        part = tl.where(2 * blocks <= 3 * share, blocks, part)
    parts = tl.maximum(tl.cdiv(blocks, tl.maximum(part, 1)), 1)
    part = tl.cdiv(blocks, parts)
    return part, tl.maximum(tl.cdiv(blocks, tl.maximum(part, 1)), 1)


@triton.jit
def parts_of_rows(  # type: ignore[no-untyped-def]
    seq_lens_ptr, rows, T: tl.constexpr, WINDOW: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr,
    LEAST: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Blocks of a share, if ROOM programs shared all contexts equally; parts of each row, [BLOCK_B].

    All rows together have at most 2 * ROOM + rows parts: a row has no more than if each but the last one were half a
    share long.
    """
    row = tl.arange(0, BLOCK_B)
    _, blocks = blocks_of(tl.load(seq_lens_ptr + row, mask=row < rows, other=0), T, WINDOW, BLOCK_N)
    share = tl.cdiv(tl.sum(blocks, 0), ROOM)
    _, parts = parts_of(blocks, share, FEW, LEAST, WHOLE)
    return share, tl.where(row < rows, parts, 0)


@triton.jit
def row_of(part, parts):  # type: ignore[no-untyped-def]
    """The row of a part, and the row's first part. The number of rows or more in place of a row: there are fewer
    parts. `parts`: of each row."""
    earlier = tl.cumsum(parts, 0) <= part
    return tl.sum(earlier.to(tl.int32), 0), tl.sum(tl.where(earlier, parts, 0), 0)


@triton.jit
def of_row(row, parts):  # type: ignore[no-untyped-def]
    """A row's first part, and how many it has. `parts`: of each row."""
    number = tl.arange(0, parts.shape[0])
    return tl.sum(tl.where(number < row, parts, 0), 0), tl.sum(tl.where(number == row, parts, 0), 0)
