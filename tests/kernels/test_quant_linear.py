"""Products of weights of 8 and 4 bits against float64, with NaN in fresh memory."""

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.dense.skinny_linear import InputNorm
from hybridrt.kernels.dense.skinny_linear_triton import Tile
from hybridrt.kernels.quant.decode_weight import decode_weight
from hybridrt.kernels.quant.quant_linear import FOUR_BIT_TOKENS, MAX_TOKENS, most_tokens, quant_linear
from hybridrt.kernels.quant.quant_linear_triton import quant_tile
from hybridrt.kernels.quant.quant_weight import dequantize
from tests.kernels.test_skinny_linear import by_formula, check
from tests.support.quant_formats import GroupCodes, from_codes
from tests.support.quant_weights import FORMATS, empty_weight, quant_weight

pytestmark = pytest.mark.usefixtures("provider")
EPS = 1e-5


def inputs(tokens, width, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 2 * width, generator=generator).to(dtype)[:, width:], generator


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(24, 256), (21, 200)], ids=str)
def test_a_product_of_each_format(name, tokens, shape):
    weight, (x, _) = quant_weight(name, *shape), inputs(tokens, shape[1])
    y, residual = quant_linear(x, weight)
    assert residual is None and y.shape == (tokens, shape[0])
    check(y, by_formula(x, dequantize(weight))[0], torch.float32)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("activation", [None, "silu_and_mul", "relu2"])
@pytest.mark.parametrize("name", ["fp8 blocks", "int4 zeros", "nvfp4"])
def test_norm_bias_and_activation_around_the_product(name, activation, tokens):
    weight, (x, generator) = quant_weight(name, 42, 160), inputs(tokens, 160)
    bias, norm_weight = torch.randn(42, generator=generator), torch.randn(160, generator=generator)
    residual = 10 * torch.randn(x.shape, generator=generator)
    expected, total = by_formula(x, dequantize(weight), bias, norm_weight, residual, activation)
    y, new_residual = quant_linear(x, weight, bias, norm=InputNorm(norm_weight, EPS, residual), activation=activation)
    check(y, expected, torch.float32)
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("first", "last"), [(128, 160), (72, 56)])
@pytest.mark.parametrize("name", ["fp8 blocks", "int4"])
def test_an_input_in_two_tensors_into_a_place(name, first, last, tokens):
    weight, (x, _) = quant_weight(name, 12, first + last), inputs(tokens, first + last)
    out = torch.full((tokens + 1, 12), torch.nan)
    y, _ = quant_linear(x[:, :first], weight, tail=x[:, first:].contiguous(), out=out[:tokens])
    assert y.data_ptr() == out.data_ptr() and bool(out[tokens:].isnan().all())
    check(y, by_formula(x, dequantize(weight))[0], torch.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tile", [(16, 64, 4, 2, 2), (32, 128, 4, 3), (16, 128, 4, 2, 3, 1)], ids=str)
def test_any_tile_of_the_weight(name, tile, monkeypatch):
    monkeypatch.setattr("hybridrt.kernels.quant.quant_linear_triton.quant_tile", lambda *_: Tile(*tile))
    weight, (x, _) = quant_weight(name, 42, 352), inputs(7, 352)
    check(quant_linear(x, weight)[0], by_formula(x, dequantize(weight))[0], torch.float32)


@pytest.mark.parametrize(
    ("name", "width", "dtype", "most"),
    [
        ("int4", 3072, torch.bfloat16, FOUR_BIT_TOKENS),
        ("int4 zeros", 3080, torch.float16, FOUR_BIT_TOKENS),
        ("int4", 3072, torch.float32, MAX_TOKENS),
        ("int4", 3076, torch.bfloat16, MAX_TOKENS),  # rows of inputs begin at no multiple of 16 bytes
        ("int4 of 32", 3072, torch.bfloat16, MAX_TOKENS),
        ("nvfp4", 3072, torch.bfloat16, FOUR_BIT_TOKENS),
        ("mxfp4", 3072, torch.bfloat16, FOUR_BIT_TOKENS),
        ("nvfp4", 3072, torch.float16, MAX_TOKENS),
        ("nvfp4", 3080, torch.bfloat16, MAX_TOKENS),
        ("fp8 blocks", 3072, torch.bfloat16, MAX_TOKENS),
    ],
)
def test_codes_that_are_decoded_in_registers_take_more_tokens(name, width, dtype, most):
    weight = empty_weight(name, 128, width)  # on "meta", for which kernels of compute capability 9.0 are compiled
    assert most_tokens(weight, dtype) == most
    if weight.scale is not None:
        others = weight._replace(scale=weight.scale.to(torch.uint8 if name != "mxfp4" else torch.float16))
        assert most_tokens(others, dtype) == MAX_TOKENS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(24, 512), (21, 200), (3, 1100)], ids=str)
def test_a_weight_is_decoded_and_rounded_once(name, shape):
    """The interpreter rounds to 16 bits towards zero: tests/gpu holds these to the reference bit for bit."""
    weight = quant_weight(name, *shape)
    assert torch.equal(decode_weight(weight, torch.float32), dequantize(weight))
    for dtype, unit in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        torch.testing.assert_close(decode_weight(weight, dtype), dequantize(weight).to(dtype), rtol=unit, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_half_precision_keeps_what_the_format_says(name):
    weight, (x, _) = quant_weight(name, 24, 256), inputs(2, 256, torch.float16)
    y, _ = quant_linear(x, weight)
    check(y, by_formula(x, dequantize(weight))[0], torch.float16)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_group_for_a_whole_row(bits, tokens):
    x, generator = inputs(tokens, 200)
    codes = torch.randint(0, 1 << bits, (24, 200), generator=generator).to(torch.uint8)
    zero, scale = torch.randint(0, 1 << bits, (24, 1), generator=generator), torch.rand(24, 1, generator=generator)
    weight = from_codes(GroupCodes(codes, scale, zero.short(), 200), bits)
    check(quant_linear(x, weight)[0], by_formula(x, dequantize(weight))[0], torch.float32)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", ["fp8 blocks", "int4 of 32", "nvfp4"])
def test_scales_past_the_last_are_not_read(name, tokens):
    weight, (x, _) = quant_weight(name, 24, 200), inputs(tokens, 200)
    room = torch.full((weight.scale.numel() + 64,), torch.nan).to(weight.scale.dtype)
    room[:-64] = weight.scale.flatten()
    y, _ = quant_linear(x, weight._replace(scale=room[:-64].view(weight.scale.shape)))
    check(y, by_formula(x, dequantize(weight))[0], torch.float32)


def test_inputs_that_do_not_fit():
    weight = quant_weight("int4", 24, 256)
    with pytest.raises(ConfigError, match=f"at most {MAX_TOKENS} tokens, not {MAX_TOKENS + 1}"):
        quant_linear(torch.zeros(MAX_TOKENS + 1, 256), weight)
    with pytest.raises(ConfigError, match="256 columns takes as many numbers a token, not 128"):
        quant_linear(torch.zeros(1, 128), weight)
    with pytest.raises(ConfigError, match="one tensor"):
        quant_linear(torch.zeros(1, 128), weight, tail=torch.zeros(1, 128), norm=InputNorm(torch.ones(256)))


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_tiles_fit_shared_memory(name, dtype, tokens):
    for rows, columns in ((64, 256), (3072, 12288), (24576, 3072)):
        weight = empty_weight(name, rows, columns)
        tile = quant_tile(weight, tokens, dtype)
        numbers = tile.block_n + dtype.itemsize * max(16, tokens)
        room = 99 if dtype == torch.float32 and tokens > 1 else 227
        assert tile.stages * numbers * tile.block_k <= room * 1024, "bytes of 8-bit tiles and of inputs"
        assert tile.split <= -(-columns // tile.block_k)
