"""Number formats of quantised checkpoints, against loops over single numbers."""

import math

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.quant import formats
from hybridrt.kernels.quant.quant_weight import (
    BITS,
    STORED,
    QuantWeight,
    check_weight,
    dequantize,
    pack_planes,
    unpack_planes,
)
from tests.support import quant_formats as checkpoint


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def codes_of(*shape, bits=4, seed=0):
    return torch.randint(0, 1 << bits, shape, generator=generator(seed)).to(torch.uint8)


def field(word, index, bits):
    """Bits of an int32 as it is stored, little end first."""
    return (int(word) & 0xFFFFFFFF) >> (index * bits) & ((1 << bits) - 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_codes_from_the_low_end(bits):
    codes = codes_of(3, 64, bits=bits)
    words = checkpoint.pack_int32(codes, bits)
    assert words.dtype == torch.int32 and bool((words < 0).any())
    per_word = 32 // bits
    for row in range(3):
        for j in range(64):
            assert field(words[row, j // per_word], j % per_word, bits) == codes[row, j]
    assert torch.equal(formats.unpack_int32(words, bits), codes)
    assert torch.equal(formats.unpack_int32(checkpoint.pack_int32(codes[:, :61], bits), bits)[:, :61], codes[:, :61])
    with pytest.raises(ConfigError, match="4 or 8 bits, not 3"):
        formats.unpack_int32(words, 3)


def test_awq_nibbles_are_for_interleaved_outputs():
    codes, zero, scale = codes_of(48, 16), codes_of(3, 16, seed=1), torch.rand(3, 16, generator=generator())
    qweight = checkpoint.pack_awq(codes)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert all(field(qweight[5, 1], k, 4) == codes[5, 8 + order[k]] for k in range(8))
    matrix = checkpoint.codes_of_awq(qweight, checkpoint.pack_awq(zero), scale.half(), group=16)
    expected = torch.empty(16, 48)
    for o in range(16):
        for i in range(48):
            expected[o, i] = (float(codes[i, o]) - float(zero[i // 16, o])) * float(scale[i // 16, o].half())
    assert torch.equal(checkpoint.dequantize_codes(matrix), expected)


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, -1), (4, 40)])
@pytest.mark.parametrize("order", ["absent", "plain", "permuted"])
def test_gptq(bits, group, v1, order):
    out, width = 8, 96
    length = width if group == -1 else group
    groups = math.ceil(width / length)
    codes, zero = codes_of(out, width, bits=bits), codes_of(out, groups, bits=bits, seed=1).clamp(min=int(v1))
    scale = torch.rand(groups, out, generator=generator()).half()
    group_of = torch.arange(width) // length
    if order == "permuted":
        group_of = group_of[torch.randperm(width, generator=generator())]
    matrix = checkpoint.codes_of_gptq(
        checkpoint.pack_int32(codes, bits).t().contiguous(), checkpoint.pack_int32((zero - int(v1)).t(), bits), scale,
        bits, group, None if order == "absent" else group_of.int(), v1=v1,
    )  # fmt: skip
    expected = torch.empty(out, width)
    for o in range(out):
        for i in range(width):
            g = group_of[i]
            expected[o, i] = (float(codes[o, i]) - float(zero[o, g])) * float(scale[g, o])
    assert torch.equal(checkpoint.dequantize_codes(matrix), expected)
    assert (matrix.group_of is None) == (order != "permuted" or groups == 1)


def test_a_zero_of_v1_borrows_from_the_next_field():
    """A writer subtracts 0x11111111 from whole words: only adding it to whole words restores them."""
    zero = torch.tensor([[5, 0, 7, 1, 0, 15, 3, 9]], dtype=torch.uint8)
    stored = (checkpoint.pack_int32(zero, 4).long() - 0x11111111) & 0xFFFFFFFF
    stored = torch.where(stored >= 1 << 31, stored - (1 << 32), stored).int()
    qweight = checkpoint.pack_int32(codes_of(8, 16), 4).t().contiguous()
    matrix = checkpoint.codes_of_gptq(qweight, stored, torch.ones(1, 8), 4, 16)
    assert matrix.zero.t().tolist() == zero.tolist()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(bits, symmetric):
    out, width, group = 10, 90, 32
    codes, zero = codes_of(out, width, bits=bits), codes_of(out, 3, bits=bits, seed=1)
    scale = torch.rand(out, 3, generator=generator()).bfloat16()
    packed_zero = None if symmetric else checkpoint.pack_int32(zero.t(), bits).t().contiguous()
    matrix = checkpoint.codes_of_compressed(
        checkpoint.pack_int32(codes, bits), scale, (out, width), bits, group, packed_zero
    )
    expected = torch.empty(out, width)
    for o in range(out):
        for i in range(width):
            z = 2 ** (bits - 1) if symmetric else float(zero[o, i // group])
            expected[o, i] = (float(codes[o, i]) - z) * float(scale[o, i // group])
    assert torch.equal(checkpoint.dequantize_codes(matrix), expected)


def test_e2m1_values_and_rounding():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(formats.decode_e2m1(torch.arange(16)), values)
    assert formats.encode_e2m1(values).tolist() == list(range(16))
    x = torch.cat((torch.linspace(-7, 7, 2801), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    for number, code in zip(x.tolist(), formats.encode_e2m1(x).tolist(), strict=True):
        distances = [abs(abs(number) - size) for size in formats.E2M1_VALUES]
        nearest = [i for i, distance in enumerate(distances) if distance == min(distances)]
        assert code % 8 == (nearest[0] if len(nearest) == 1 else next(i for i in nearest if i % 2 == 0)), number
        assert (code >= 8) == (math.copysign(1, number) < 0)


def test_the_even_input_is_in_the_low_nibble():
    codes = codes_of(2, 6)
    packed = formats.pack_pairs(codes)
    assert packed.shape == (2, 3) and int(packed[1, 2]) == int(codes[1, 4]) + 16 * int(codes[1, 5])
    assert torch.equal(formats.unpack_pairs(packed), codes)


def test_e8m0_is_a_power_of_two_and_255_is_nan():
    exponents = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    expected = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    for stored in (exponents, exponents.view(torch.float8_e8m0fnu)):
        values = formats.decode_e8m0(stored)
        assert values[:-1].tolist() == expected and bool(values[-1].isnan())


@pytest.mark.parametrize("shape", [(256, 128), (144, 320), (64, 100)], ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e8m0", "four dimensions"])
def test_fp8_blocks_with_partial_edges(shape, kind):
    """144 rows are a block of 128 and one of 16, not two of 72."""
    weight = torch.randn(shape, generator=generator()).to(torch.float8_e4m3fn)
    grid = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    scale = torch.rand(grid, generator=generator()) + 0.5
    if kind == "e8m0":
        scale = torch.randint(120, 130, grid, generator=generator()).to(torch.uint8)
    elif kind == "bfloat16":
        scale = scale.bfloat16()
    values = formats.scale_values(scale)
    stored = scale[:, None, :, None] if kind == "four dimensions" else scale
    got = checkpoint.dequantize_fp8(weight, stored, (128, 128))
    for r in (0, shape[0] // 2, shape[0] - 1):
        for c in (0, shape[1] // 2, shape[1] - 1):
            assert got[r, c] == weight[r, c].float() * values[r // 128, c // 128]
    with pytest.raises(ConfigError, match="scales, not"):
        formats.expand_blocks(scale.repeat(2, 1), shape, (128, 128))


def test_fp8_scales_of_a_tensor_of_rows_and_of_32_inputs():
    weight = torch.randn(6, 64, generator=generator()).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(0.3), torch.tensor([0.3])):
        assert torch.equal(checkpoint.dequantize_fp8(weight, scale), weight.float() * 0.3)
    rows = torch.rand(6, generator=generator())
    for scale in (rows, rows[:, None]):
        assert torch.equal(checkpoint.dequantize_fp8(weight, scale), weight.float() * rows[:, None])
    exponents = torch.randint(120, 130, (6, 2), generator=generator()).to(torch.uint8)
    expected = (weight.float().view(6, 2, 32) * formats.decode_e8m0(exponents)[..., None]).view(6, 64)
    assert torch.equal(checkpoint.dequantize_fp8(weight, exponents, (1, 32)), expected)
    with pytest.raises(ConfigError, match="6 rows has 1 or 6 scales, not 5"):
        checkpoint.dequantize_fp8(weight, torch.rand(5))


def test_fp4_with_scales_of_both_kinds():
    codes = codes_of(2, 4, 64)
    packed, values = formats.pack_pairs(codes), formats.decode_e2m1(codes)
    scale = torch.rand(2, 4, 4, generator=generator()).to(torch.float8_e4m3fn)
    expected = values.view(2, 4, 4, 16) * (scale.float() * 0.125)[..., None]
    assert torch.equal(checkpoint.dequantize_fp4(packed, scale, 0.125), expected.view(2, 4, 64))
    exponents = torch.randint(120, 130, (2, 4, 2), generator=generator()).to(torch.uint8)
    expected = values.view(2, 4, 2, 32) * formats.decode_e8m0(exponents)[..., None]
    assert torch.equal(checkpoint.dequantize_fp4(packed, exponents), expected.view(2, 4, 64))


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("code", ["int4", "e2m1"])
def test_planes_keep_neighbouring_columns_in_neighbouring_words(width, code):
    codes = codes_of(2, 3, width)
    words = pack_planes(codes, code)
    assert words.dtype == torch.int32 and words.shape == (2, 3, 8)
    halves = words.view(torch.int16)
    for column in range(width):
        word = int(halves[1, 2, column // 32 * 8 + column % 8]) & 0xFFFF
        places = BITS[code][column % 32 // 8]
        assert sum((word >> bit & 1) << i for i, bit in enumerate(places)) == codes[1, 2, column]
    assert torch.equal(unpack_planes(words, code, width), codes)
    assert sorted(bit for plane in BITS[code] for bit in plane) == list(range(16))


@pytest.mark.parametrize("code", ["e4m3", "int8", "int4", "e2m1"])
def test_a_weight_is_what_its_tensors_say(code):
    rows, width, block = 6, 40, (4, 16)
    codes = codes_of(rows, width)
    zero = torch.randint(0, 16, (2, 3), generator=generator(1)).short() if code in ("int4", "int8") else None
    scale, factor = torch.rand(2, 3, generator=generator()), torch.rand(rows, generator=generator())
    data = pack_planes(codes, code) if code in ("int4", "e2m1") else codes.float().to(STORED[code])
    weight = QuantWeight(data, code, width, block, scale, zero, factor)
    check_weight(weight)
    got = dequantize(weight)
    for r in range(rows):
        for k in range(width):
            number = float(formats.decode_e2m1(codes[r, k])) if code == "e2m1" else float(codes[r, k])
            number -= 0 if zero is None else int(zero[r // 4, k // 16])
            assert got[r, k] == pytest.approx(number * float(scale[r // 4, k // 16]) * float(factor[r]), rel=1e-6)
    plain = dequantize(QuantWeight(data, code, width))
    assert (
        plain[0, 0] == float(formats.decode_e2m1(codes[0, 0]))
        if code == "e2m1"
        else int(codes[0, 0]) - 8 * (code == "int4")
    )


def test_tensors_of_a_weight_that_do_not_fit():
    data = pack_planes(codes_of(6, 40), "int4")
    good = QuantWeight(data, "int4", 40, (1, 16), torch.ones(6, 3))
    check_weight(good)
    for wrong, match in (
        (good._replace(code="e4m3"), r"e4m3 codes are stored as torch.float8_e4m3fn, not torch.int32"),
        (good._replace(width=72), "72 int4 columns are 12 numbers, not 8"),
        (good._replace(scale=torch.ones(6, 2)), r"scale of blocks \[1, 16\] is \[6, 3\], not \[6, 2\]"),
        (good._replace(zero=torch.ones(6, 3)), "zero points are int16, not torch.float32"),
        (good._replace(zero=torch.ones(6, 2)), r"zero of blocks \[1, 16\] is \[6, 3\], not \[6, 2\]"),
        (good._replace(block=(1, 20), scale=torch.ones(6, 2)), "16 columns or a multiple of 32, not 20"),
        (good._replace(factor=torch.ones(5)), "6 rows, not 5"),
    ):
        with pytest.raises(ConfigError, match=match):
            check_weight(wrong)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_a_checkpoint_become_a_weight(bits, symmetric):
    codes, scale = codes_of(6, 96, bits=bits), torch.rand(6, 3, generator=generator()).half()
    zero = torch.full((6, 3), 1 << (bits - 1)) if symmetric else codes_of(6, 3, bits=bits, seed=1)
    matrix = checkpoint.GroupCodes(codes, scale, zero.short(), 32)
    weight = checkpoint.from_codes(matrix, bits)
    check_weight(weight)
    assert (weight.zero is None) == symmetric
    assert torch.equal(dequantize(weight), checkpoint.dequantize_codes(matrix))
    whole = checkpoint.from_codes(matrix._replace(scale=scale[:, :1], zero=matrix.zero[:, :1], group=128), bits)
    check_weight(whole)
    assert whole.block == (1, 96)
    with pytest.raises(ConfigError, match="sort columns"):
        checkpoint.from_codes(matrix._replace(group_of=torch.arange(96) % 3), bits)


@pytest.mark.parametrize(
    "factor", [None, torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([[0.5] * 4, [2.0] * 4])]
)
def test_fp4_bytes_of_a_checkpoint_become_a_weight(factor):
    packed = formats.pack_pairs(codes_of(2, 4, 64))
    scale = torch.rand(2, 4, 4, generator=generator()).to(torch.float8_e4m3fn)
    weight = checkpoint.from_pairs(packed, scale, factor)
    check_weight(weight)
    wide = 1.0 if factor is None else factor if factor.dim() < 2 else factor[..., None]
    assert torch.equal(dequantize(weight), checkpoint.dequantize_fp4(packed, scale, wide))
    exponents = torch.randint(120, 130, (2, 4, 2), generator=generator()).to(torch.uint8)
    got = checkpoint.from_pairs(packed, exponents.view(torch.float8_e8m0fnu))
    assert got.block == (1, 32) and torch.equal(dequantize(got), checkpoint.dequantize_fp4(packed, exponents))
