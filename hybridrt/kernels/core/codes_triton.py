"""Decodes weights of 8 and 4 bits within kernels. CODE is that of `QuantWeight`, None for plain numbers.

Tiles of 4-bit codes are int32, two neighbouring int16 words each. A mask takes two codes at a time
out of one, and leaves them as two bfloat16 numbers. A tile of W such words has 4 planes of 2 W
columns: 8 of each run of 32.
"""

import triton
import triton.language as tl

# Assembler for pairs of bfloat16, which Gluon functions share. A product plus -0 is the same number.


@triton.constexpr_function
def e4m3_scales(raised=False):  # type: ignore[no-untyped-def]
    """Pairs of e4m3 scales of $1, their bits as those of bfloat16, 2^-120 times the scale: times 2^120, 0x7B80.
    `raised`: times 2^63, 0x5F00, as well."""
    up = "mov.b32 b, 0x5F005F00; fma.rn.bf16x2 a, a, b, z;" if raised else ""
    one = "mov.b32 a, 0x7B807B80; mov.b32 z, 0x80008000; fma.rn.bf16x2 a, $1, a, z;"
    return f"{{.reg .b32 a, b, z; {one} {up} mov.b32 $0, a;}}"


@triton.constexpr_function
def scaled_e2m1(plane, raw=False):  # type: ignore[no-untyped-def]
    """A plane's pairs of the words $1 times pairs of scales $2; `raw`: divided by 2^126. 0x7E80 is 2^126. `mul` of
    pairs needs sm_90, so products are `fma` with -0."""
    bits = (
        "and.b32 a, $1, 0x81C081C0;",
        "shl.b32 a, $1, 3; and.b32 a, a, 0x81C081C0;",
        "shl.b32 a, $1, 6; and.b32 a, a, 0x81C081C0;",
        """shl.b32 a, $1, 1; and.b32 a, a, 0x80008000; shr.u32 b, $1, 3; lop3.b32 a, b, 0x01800180, a, 0xEA;
            shr.u32 b, $1, 7; lop3.b32 a, b, 0x00400040, a, 0xEA;""",
    )
    up = "" if raw else "mov.b32 b, 0x7E807E80; fma.rn.bf16x2 a, a, b, z;"
    return f"{{.reg .b32 a, b, z; {bits[plane]} mov.b32 z, 0x80008000; {up} fma.rn.bf16x2 $0, a, $2, z;}}"


@triton.jit
def decode(tile, PLANE: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr, RAW: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Exact numbers in DTYPE: [R, C] of 8 bits, or [R, 4 W] if the tile is of int32 words [R, W]; of 4 bits those of
    plane PLANE, [R, 2 W].
    "int4" is code + 128. RAW: divided by `raw_scale` twice."""
    if CODE == "int4":
        # 128 + code: bfloat16 has 7 bits of mantissa.
        values = _pairs(((tile >> (4 * PLANE)) & 0x000F000F) | 0x43004300, DTYPE).to(DTYPE)
    elif CODE == "e2m1":
        # Sign, low bits of the exponent, high bit of the mantissa: 2^-126 times the number.
        if PLANE == 3:
            bits = ((tile << 1) & -0x7FFF8000) | ((tile >> 3) & 0x01800180) | ((tile >> 7) & 0x00400040)
        else:
            bits = (tile << (3 * PLANE)) & -0x7E3F7E40  # 0x81C081C0 as int32
        values = _pairs(bits, DTYPE)
        if not RAW:
            values = (values * 8.507059173023462e37).to(DTYPE)  # 2^126
    else:
        if tile.dtype == tl.int32:
            tile = _bytes(tile, CODE)
        # Through float32: Triton's way from e4m3 to bfloat16 takes a slow conversion.
        values = tile.to(tl.float32).to(DTYPE)
    return values


@triton.jit
def raw_scale(CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^63 for "e2m1", else 1: products of float32 numbers with inputs that were multiplied by it are no subnormals."""
    return 9.223372036854775808e18 if CODE == "e2m1" else 1.0


@triton.jit
def _bytes(words, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, 4 W] numbers of int32 words [R, W]."""
    TYPE: tl.constexpr = tl.float8e4nv if CODE == "e4m3" else tl.int8
    first = (words & 0xFF).to(tl.uint8).to(TYPE, bitcast=True)
    second = ((words >> 8) & 0xFF).to(tl.uint8).to(TYPE, bitcast=True)
    third = ((words >> 16) & 0xFF).to(tl.uint8).to(TYPE, bitcast=True)
    last = ((words >> 24) & 0xFF).to(tl.uint8).to(TYPE, bitcast=True)
    numbers = tl.join(tl.join(first, third), tl.join(second, last))
    return tl.reshape(numbers, [words.shape[0], 4 * words.shape[1]])


@triton.jit
def _pairs(words, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, 2 W] numbers of two bfloat16 in each int32: bfloat16 if DTYPE is, else float32."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        low = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -0x10000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [words.shape[0], 2 * words.shape[1]])


@triton.jit
def run_columns(i, PLANE: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of the i-th numbers of `decode`."""
    if CODE == "int4" or CODE == "e2m1":
        i = i // 8 * 32 + PLANE * 8 + i % 8
    return i


@triton.jit
def run_blocks(start, run, PLANE: tl.constexpr, CODE: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks of the columns of runs from `start` on: of 16 columns, or 8 of 32. Past K, the last."""
    if CODE == "int4" or CODE == "e2m1":
        if COLUMNS == 16:
            block = (start // 32 + run) * 2 + PLANE // 2
        else:
            block = (start + run * 32) // COLUMNS
    else:
        block = (start + run * 16) // COLUMNS
    return tl.minimum(block, (K + COLUMNS - 1) // COLUMNS - 1)


@triton.jit
def load_scale(pointers):  # type: ignore[no-untyped-def]
    """Scales in float32. Those of uint8 are exponents: 2^(s - 127)."""
    scale = tl.load(pointers)
    if scale.dtype == tl.uint8:
        bits = tl.where(scale == 0, 0x400000, scale.to(tl.int32) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def spread(x, RUN: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] to [R, C * RUN], each number RUN times."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], RUN])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * RUN])


@triton.jit
def block_pointers(scale_ptr, row, block, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers [rows, blocks] to scales or zero points."""
    return scale_ptr + (row // ROWS * ((K + COLUMNS - 1) // COLUMNS))[:, None] + block[None, :]


@triton.jit
def zero_numbers(  # type: ignore[no-untyped-def]
    zero_ptr, row, block, K: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """What `decode` gives for a weight of zero, float32 [rows, blocks] or [1, 1]."""
    if zero_ptr is None:
        zero = tl.full([1, 1], 136.0, tl.float32)
    else:
        zero = tl.load(block_pointers(zero_ptr, row, block, K, ROWS, COLUMNS)).to(tl.float32)
        if CODE == "int4":
            zero += 128.0
    return zero


@triton.jit
def block_sums(  # type: ignore[no-untyped-def]
    products, inputs, scale_ptr, zero_ptr, row, start, PLANE: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """[R, C]: sums over runs of products [R, C * RUN] of `decode`d numbers with inputs [C * RUN], less zero points,
    times scales, in float32."""
    runs: tl.constexpr = inputs.shape[0] // RUN
    sums = tl.sum(tl.reshape(products, [products.shape[0], runs, RUN]), axis=2)
    block = run_blocks(start, tl.arange(0, runs), PLANE, CODE, COLUMNS, K)
    if CODE == "int4" or zero_ptr is not None:
        whole = tl.sum(tl.reshape(inputs, [runs, RUN]), axis=1)
        sums -= zero_numbers(zero_ptr, row, block, K, CODE, ROWS, COLUMNS) * whole[None, :]
    if scale_ptr is not None:
        sums *= load_scale(block_pointers(scale_ptr, row, block, K, ROWS, COLUMNS))
    return sums * raw_scale(CODE)


@triton.jit
def dequantized(  # type: ignore[no-untyped-def]
    tile, scale_ptr, zero_ptr, row, start, PLANE: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ONE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`decode` less zero points, times scales unless ONE block is for the whole row of the tile. Exact for scales of
    fp4."""
    RUN: tl.constexpr = 8 if CODE == "int4" or CODE == "e2m1" else 16
    WIDTH: tl.constexpr = 2 * tile.shape[1] if RUN == 8 else tile.shape[1]
    block = run_blocks(start, tl.arange(0, 1 if ONE else WIDTH // RUN), PLANE, CODE, COLUMNS, K)
    scaled: tl.constexpr = scale_ptr is not None and not ONE
    if CODE == "e2m1" and DTYPE == tl.bfloat16 and scaled:  # noqa: SIM300
        scale = _scale_pairs(tl.load(block_pointers(scale_ptr, row, block, K, ROWS, COLUMNS)))
        values = _pairs(_scaled_e2m1(tile, spread(scale, RUN // 2), PLANE), DTYPE)
    else:
        values = decode(tile, PLANE, CODE, DTYPE)
        if CODE == "int4" or zero_ptr is not None:
            zero = zero_numbers(zero_ptr, row, block, K, CODE, ROWS, COLUMNS).to(DTYPE)
            if zero_ptr is not None and not ONE:
                zero = spread(zero, RUN)
            values -= zero
        if scaled:
            scale = load_scale(block_pointers(scale_ptr, row, block, K, ROWS, COLUMNS)).to(DTYPE)
            values *= spread(scale, RUN)
    return values


@triton.jit
def _scale_pairs(scale):  # type: ignore[no-untyped-def]
    """Scales, each twice in an int32 as bfloat16."""
    if scale.dtype == tl.uint8:
        pair = tl.where(scale == 0, 0x00400040, scale.to(tl.int32) * 0x00800080)
    elif scale.dtype == tl.float8e4nv:
        # 4 bits of exponent in the place of 8: 2^-120 times the scale. 0x7B80 is 2^120.
        pair = (scale.to(tl.uint8, bitcast=True).to(tl.int32) & 0x7F) * 0x00100010
        pair = tl.inline_asm_elementwise(
            e4m3_scales(),
            "=r,r",
            [pair],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        pair = scale.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) * 0x00010001
    return pair


@triton.jit
def _scaled_e2m1(tile, scale, PLANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of a plane times pairs of scales. In assembler: LLVM would take the pairs apart."""
    return tl.inline_asm_elementwise(scaled_e2m1(PLANE), "=r,r,r", [tile, scale], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def tile_scale(scale_ptr, row, start, K: tl.constexpr, CODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, 1]: scales of a tile from column `start` on, with one block for each row."""
    block = run_blocks(start, tl.arange(0, 1), 0, CODE, COLUMNS, K)
    return load_scale(block_pointers(scale_ptr, row, block, K, ROWS, COLUMNS))
