"""Gluon functions that make numbers of codes in the registers from which tensor cores read, and multiply with them.

Words of 4-bit codes are those of `pack_planes`: a run of 32 codes is four words, plane p of word w has its columns
8 p + 2 w and the next one. Two codes of a plane become two numbers in a few instructions.

int4: in bfloat16, 128 with a code in its last bits is 128 + code, exactly, and so is 1024 in float16.

e2m1: in bfloat16, its bits in their places are 2^-126 times the number. They are multiplied with 2^63 times the scale,
which is exact for those of fp4, and sums of their products with `E2M1_FACTOR`. MXFP4 scales below 2^-69 may be rounded,
and those above 2^64 are infinite.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from hybridrt.kernels.core.codes_triton import e4m3_scales, scaled_e2m1

E2M1_FACTOR = gl.constexpr(2.0**63)


@triton.constexpr_function
def _rows_of_mma(rows, warps):  # type: ignore[no-untyped-def]
    """Bases of more registers, and of warps, of a linear layout: rows from 16 on, as `mma_v2` reads them."""
    repeats = [[16 * warps << i, 0] for i in range((rows // (16 * warps)).bit_length() - 1)]
    return repeats, [[16 << i, 0] for i in range(warps.bit_length() - 1)]


@triton.constexpr_function
def runs_by_thread(rows, warps):  # type: ignore[no-untyped-def]
    """Of words [rows, 16]: a thread has a run of a row, 16 bytes, and rows as `mma_v2` reads them."""
    repeats, of_warps = _rows_of_mma(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *repeats], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], of_warps, [], [rows, 16]
    )


@triton.constexpr_function
def bytes_by_thread(rows, warps):  # type: ignore[no-untyped-def]
    """Of words [rows, 32], 4 codes of 8 bits each: a thread has 16 bytes of each half of a row, and rows as `mma_v2`
    reads them with a width of 16."""
    repeats, of_warps = _rows_of_mma(rows, warps)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], *repeats], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], of_warps, [], [rows, 32]
    )


@triton.constexpr_function
def of_runs(layout, rows):  # type: ignore[no-untyped-def]
    """The layout of words [rows, 16] as that of [rows, 4 runs, 4 words]."""

    def split(bases):  # type: ignore[no-untyped-def]
        return [[row, column // 4, column % 4] for row, column in bases]

    return gl.DistributedLinearLayout(
        split(layout.reg_bases), split(layout.lane_bases), split(layout.warp_bases), [], [rows, 4, 4]
    )


@triton.constexpr_function
def words_by_thread():  # type: ignore[no-untyped-def]
    """Of words [64, 16]: a thread of a warpgroup has a word of each run, and rows as `warpgroup_mma` reads them."""
    return gl.DistributedLinearLayout(
        [[0, 4], [0, 8], [8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )


@gluon.jit
def _pair(words, zeros, PLANE: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """A plane's two numbers of each word [..., 2]. zeros: what is subtracted from them, twice in a word; or None."""
    MAGIC: gl.constexpr = 0x43004300 if dtype == gl.bfloat16 else 0x64006400
    shifted = words >> (4 * PLANE)
    # One instruction: the compiler makes two.
    if zeros is None:
        both = gl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F000F, $2, 0xEA;", "=r,r,r", [shifted, MAGIC], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        KIND: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
        both = gl.inline_asm_elementwise(
            "{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, $2, 0xEA; sub.rn." + KIND + " $0, t, $3; }", "=r,r,r,r",
            [shifted, MAGIC, zeros], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return _two_numbers(both, dtype)


@gluon.jit
def _two_numbers(words, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """[..., 2]: the halves of int32 words."""
    low = (words & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _planes(words, zeros, M: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """[M, 4 runs, 4 words, 2 columns of a pair, 2 planes of a half, 2 halves] of words [M, 16]."""
    first = gl.join(_pair(words, zeros, 0, dtype), _pair(words, zeros, 1, dtype))
    second = gl.join(_pair(words, zeros, 2, dtype), _pair(words, zeros, 3, dtype))
    return gl.reshape(gl.join(first, second), [M, 4, 4, 2, 2, 2])


@gluon.jit
def load_e2m1_scales(  # type: ignore[no-untyped-def]
    scale_ptr, row, group, K: gl.constexpr, COLUMNS: gl.constexpr, M: gl.constexpr, loads: gl.constexpr
):
    """Bytes of scales of rows [M] and their groups of 128 columns [M], in `loads`, the layout of words [M, 16], without
    its words: int16 [M, 4 runs] of two e4m3 if COLUMNS is 16, else uint8 of an exponent. Past K, any. Signs,
    NaN and exponent 255 are not read as such: checkpoints with them are refused."""
    runs: gl.constexpr = gl.SliceLayout(2, of_runs(loads, M))
    if COLUMNS == 16:
        scale_ptr = scale_ptr.cast(gl.pointer_type(gl.int16))
    run = gl.expand_dims(group * 4, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, runs)), 0)
    return gl.load(scale_ptr + gl.expand_dims(row.to(gl.int64) * (K // 32), 1) + gl.minimum(run, K // 32 - 1))


@gluon.jit
def _scale_pair(scale, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """2^63 times the scales of a half of the planes, each twice in an int32 as bfloat16 [M, 4, 1]."""
    if scale.dtype == gl.uint8:
        pair = gl.minimum(scale.to(gl.int32) + 63, 255) * 0x00800080
    else:
        # 4 bits of exponent in the place of 8: 2^-120 times the scale.
        pair = ((scale.to(gl.int32) >> (8 * HALF)) & 0x7F) * 0x00100010
        pair = gl.inline_asm_elementwise(e4m3_scales(True), "=r,r", [pair], dtype=gl.int32, is_pure=True, pack=1)
    return gl.expand_dims(pair, 2)


@gluon.jit
def _e2m1_pair(words, scale, PLANE: gl.constexpr):  # type: ignore[no-untyped-def]
    """A plane's two numbers of each word, times its scale, divided by E2M1_FACTOR, bfloat16 [..., 2]."""
    both = gl.inline_asm_elementwise(
        scaled_e2m1(PLANE, True), "=r,r,r", [words, scale], dtype=gl.int32, is_pure=True, pack=1
    )
    return _two_numbers(both, gl.bfloat16)


@gluon.jit
def _e2m1_planes(words, scale, M: gl.constexpr, loads: gl.constexpr):  # type: ignore[no-untyped-def]
    """As `_planes`, of words in layout `loads` and bytes of `load_e2m1_scales`."""
    words = gl.convert_layout(gl.reshape(words, [M, 4, 4]), of_runs(loads, M), assert_trivial=True)
    low, high = _scale_pair(scale, 0), _scale_pair(scale, 1)
    first = gl.join(_e2m1_pair(words, low, 0), _e2m1_pair(words, low, 1))
    second = gl.join(_e2m1_pair(words, high, 2), _e2m1_pair(words, high, 3))
    return gl.join(first, second)


@gluon.jit
def numbers_by_run(words, M: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    """128 + codes in bfloat16 [M, 128] of words with `runs_by_thread`, in the order of `columns_by_run`, as tensor
    cores read them in layout `left`."""
    return _by_run(_planes(words, None, M, gl.bfloat16), M, left)


@gluon.jit
def e2m1_by_run(words, scale, M: gl.constexpr, loads: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    """`numbers_by_run` of e2m1 times bytes of `load_e2m1_scales`, divided by E2M1_FACTOR."""
    return _by_run(_e2m1_planes(words, scale, M, loads), M, left)


@gluon.jit
def _by_run(planes, M: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    found = gl.reshape(gl.permute(planes, (0, 2, 5, 4, 1, 3)), [M, 128])
    return gl.convert_layout(found, left, assert_trivial=True)


@gluon.jit
def _e4m3_pair(words, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two codes of each word, those of its low ("l") or high ("h") half, as two float16 in an int32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, " + HALF + "; }", "=r,r", [words],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def e4m3_in_order(words, M: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    """Codes in float16 [M, 128], of words with `bytes_by_thread`, in layout `left`."""
    # Triton keeps each code that a loop carries in a register of its own, so these are words until here.
    halves = gl.join(_e4m3_pair(words, "l"), _e4m3_pair(words, "h"))
    found = gl.reshape(_two_numbers(halves, gl.float16), [M, 128])
    return gl.convert_layout(found, left, assert_trivial=True)


@gluon.jit
def fragments(tile, scale, CODE: gl.constexpr, M: gl.constexpr, loads: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    """[M, 128] as tensor cores read them, those of 4 bits in the order of `columns_by_run`. int4: 128 + codes. e2m1:
    times their scales, divided by E2M1_FACTOR. e4m3: in float16, of words or of codes."""
    if CODE == "int4":
        numbers = numbers_by_run(tile, M, left)
    elif CODE == "e2m1":
        numbers = e2m1_by_run(tile, scale, M, loads, left)
    elif tile.dtype == gl.int32:
        numbers = e4m3_in_order(tile, M, left)
    else:
        numbers = tile.to(gl.float16)
    return numbers


@gluon.jit
def columns_by_run(x, M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Inputs [M, 128] in the order in which `numbers_by_run` has columns: by word of a run, half of its planes, plane
    of the half, run, and column of the pair."""
    x = gl.reshape(x, [M, 4, 2, 2, 4, 2])  # run, half, plane, word, column
    return gl.reshape(gl.permute(x, (0, 4, 2, 3, 1, 5)), [M, 128])


@gluon.jit
def numbers_in_order(words, zero, dtype: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    """code - zero [64, 128] of words with `words_by_thread`, columns in their order, as `warpgroup_mma` reads them in
    layout `left`. zero: a number for each row, or None, which is 8."""
    OFFSET: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    if zero is None:
        zeros = 0x43084308 if dtype == gl.bfloat16 else 0x64086408
    else:
        bits = (zero + OFFSET).to(dtype).to(gl.uint16, bitcast=True).to(gl.int32)
        zeros = gl.expand_dims(bits | (bits << 16), 1)
    return _in_order(_planes(words, zeros, 64, dtype), left)


@gluon.jit
def e2m1_in_order(words, scale, loads: gl.constexpr, left: gl.constexpr):  # type: ignore[no-untyped-def]
    """`numbers_in_order` of e2m1 times bytes of `load_e2m1_scales`, divided by E2M1_FACTOR."""
    return _in_order(_e2m1_planes(words, scale, 64, loads), left)


@gluon.jit
def _in_order(planes, left: gl.constexpr):  # type: ignore[no-untyped-def]
    found = gl.reshape(gl.permute(planes, (0, 1, 5, 4, 2, 3)), [64, 128])
    return gl.convert_layout(found, left, assert_trivial=True)


@gluon.jit
def add_products(acc, a, b, sides, scale, zero, CODE: gl.constexpr, mma: gl.constexpr):  # type: ignore[no-untyped-def]
    """acc [M, T] and the products of a group of 128 columns: a of `fragments`, b [128, T].

    Args:
        sides: float32 [T] in shared memory: what each token's products are multiplied with (e4m3), or the sum of its
            inputs (int4). None: products are added as they are.
        scale, zero: float32 [M] of rows. None: 1, and 8 of int4.
    """
    if sides is None:
        acc = mma_v2(a, b, acc)
    else:
        products = mma_v2(a, b, gl.zeros(acc.shape, gl.float32, mma))
        side = gl.expand_dims(sides.load(gl.SliceLayout(0, mma)), 0)
        if CODE == "e4m3":
            products *= side
        elif zero is None:
            products -= 136.0 * side
        else:
            products -= gl.expand_dims(128.0 + zero, 1) * side
        if scale is not None:
            products *= gl.expand_dims(scale, 1)
        acc += products
    return acc


@gluon.jit
def sum_of_parts(acc, PARTS: gl.constexpr, ROWS: gl.constexpr, mma: gl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS] of acc [PARTS * ROWS, columns]: of each part the products with its own column."""
    part = gl.expand_dims(gl.arange(0, PARTS * ROWS, gl.SliceLayout(1, mma)) // ROWS, 1)
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, mma)), 0)
    own = gl.sum(gl.where(part == column, acc, 0.0), 1)
    return gl.sum(gl.reshape(own, [PARTS, ROWS]), 0)
