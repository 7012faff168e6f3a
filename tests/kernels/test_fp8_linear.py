"""Products of e4m3 codes: quantised inputs, kernels next to their references."""

from typing import Any

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.base.quantization import Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, InputNorm
from hybridrt.kernels.quant.fp8_linear import GROUP, decoded_tokens, fp8_linear, fp8_token_linear, quantize_tokens
from hybridrt.kernels.quant.quant_weight import dequantize, expert_of
from hybridrt.layers.quant.fp8_products import fp8_product, takes_kernel
from hybridrt.layers.quant.kernel_weight import kernel_weight
from hybridrt.layers.quant.packed_weight import PackedWeight
from hybridrt.layers.weights import Build
from tests.support.quant_weights import empty_weight, quant_weight

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")
COUNTS = (1, 64, 65, 96, 112, 113, 128, 129, 256)  # of tokens


def tokens(count: int, width: int, seed: int = 0) -> torch.Tensor:
    sizes = torch.logspace(-3, 2, width // GROUP).repeat_interleave(GROUP)
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * sizes).bfloat16()


@pytest.mark.parametrize("whole", [False, True])
def test_quantised_tokens_are_near_and_have_the_scale_of_their_largest_number(whole: bool) -> None:
    x = tokens(3, 512)
    group = 512 if whole else GROUP
    codes, residual = quantize_tokens.reference(x, group)
    assert residual is None and len(codes.codes) == 16 and codes.tokens == 3
    largest = x.float().unflatten(1, (-1, group)).abs().amax(2)
    torch.testing.assert_close(codes.scale[:, :3].t() * 448, largest)
    limit = (largest / 448).repeat_interleave(group, 1) * 2**-10 + x.float().abs() / 16
    assert ((decoded_tokens(codes) - x.float()).abs() <= limit).all()


def test_a_token_of_zeros_and_one_that_is_not_finite() -> None:
    x = torch.zeros(2, GROUP, dtype=torch.bfloat16)
    x[1, 5] = torch.inf
    found = decoded_tokens(quantize_tokens.reference(x, GROUP)[0])
    assert (found[0] == 0).all() and not found[1, 5].isfinite()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("width", [256, 2304])
def test_the_kernel_quantises_as_the_reference(whole: bool, width: int) -> None:
    from hybridrt.kernels.quant.fp8_linear_triton import quantize_tokens_triton

    x, residual = tokens(5, width), tokens(5, width, 1).float()  # float32: the interpreter rounds to bfloat16 otherwise
    norm = InputNorm(torch.rand(width) + 0.5, 1e-5, residual)
    group = width if whole else GROUP
    for own in (None, norm, norm._replace(residual=None)):
        wanted, total = quantize_tokens.reference(x, group, own)
        given = own if own is None or own.residual is None else own._replace(residual=own.residual.clone())
        got, sum_of = quantize_tokens_triton(x, group, given)
        torch.testing.assert_close(got.scale[:, :5], wanted.scale[:, :5], rtol=1e-5, atol=0)
        torch.testing.assert_close(decoded_tokens(got), decoded_tokens(wanted), rtol=0.07, atol=1e-6)
        assert (got.codes[:5].float() == wanted.codes[:5].float()).float().mean() > 0.98
        assert (total is None) == (sum_of is None) and (total is None or torch.equal(total, sum_of))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("before", ["silu_and_mul", "relu2"])
def test_an_activation_before_is_quantised_as_its_stored_results(before: Activation, whole: bool) -> None:
    from hybridrt.kernels.quant.fp8_linear_triton import quantize_tokens_triton

    width = 2304
    x = tokens(5, 2 * width if before == "silu_and_mul" else width)
    group = width if whole else GROUP
    for quantize in (quantize_tokens.reference, quantize_tokens_triton):
        if quantize is quantize_tokens_triton:
            x = x.float()  # the interpreter's bfloat16 loses carries into the exponent
        stored, _ = quantize_tokens.reference(ACTIVATIONS[before].reference(x.float()).to(x.dtype), group)
        found, total = quantize(x, group, before=before)
        assert total is None and found.codes.shape == stored.codes.shape
        torch.testing.assert_close(found.scale[:, :5], stored.scale[:, :5], rtol=2**-7, atol=0)
        got, wanted = found.codes[:5].float(), stored.codes[:5].float()
        assert ((got - wanted).abs() <= wanted.abs() / 8 + 2**-9).all()  # one code
        assert (got == wanted).float().mean() > 0.98


@pytest.mark.parametrize("count", [2, 17, 64])
@pytest.mark.parametrize(("name", "rows", "width"), [("fp8 blocks", 320, 1152), ("fp8 rows", 200, 1152)])
def test_the_product_is_near_the_reference(name: str, rows: int, width: int, count: int) -> None:
    from hybridrt.kernels.quant.fp8_linear_triton import fp8_linear_triton

    weight = quant_weight(name, rows, width)
    codes, _ = quantize_tokens.reference(tokens(count, width), GROUP if weight.scale is not None else width)
    bias = torch.randn(rows).bfloat16()
    for activation in (None, "silu_and_mul"):
        wanted = fp8_linear.reference(codes, weight, bias, dtype=torch.float32, activation=activation)
        got = fp8_linear_triton(codes, weight, bias, dtype=torch.float32, activation=activation)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_from_65_tokens_on_rows_say_which_kernel_runs() -> None:
    def ours(name: str, rows: int, width: int) -> list[int]:
        return [count for count in COUNTS if takes_kernel(count, empty_weight(name, rows, width))]

    assert ours("fp8 rows", 3072, 12288) == [1, 64]
    for rows in (3072, 4096, 16385, 24576):
        assert ours("fp8 blocks", rows, 3072) == [1, 64, 65, 96, 112, 113, 128]
    for rows in (4097, 8728, 16384):
        assert ours("fp8 blocks", rows, 3072) == [1, 64, 113, 128]


@pytest.mark.parametrize("parts", [(200, 56, 24), (256, 128), (300,)])
def test_multipliers_of_parts_become_part_of_the_scales(parts: tuple[int, ...]) -> None:
    """Each part begins with a block of its own, also where it is not a multiple of 128 rows."""
    weight = PackedWeight(Scheme("fp8", "fp8", (128, 128)), parts, 256, Build(TPGroup(), torch.float32, CPU))
    torch.manual_seed(0)
    weight.codes.data.copy_((64 * torch.randn(weight.codes.shape)).clamp(-448, 448))
    weight.scales.data.uniform_(0.5, 1.5)
    for part in range(len(parts)):
        weight.scale_part(0, part, 0.5 + part)
    wanted, found = weight.dequantize(), kernel_weight(weight)
    assert found is not None
    product = fp8_product(expert_of(found, 0))
    assert product is not None and product.weight.factor is None
    torch.testing.assert_close(dequantize(product.weight), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_scales_of_any_dtype_are_those_of_the_product(dtype: torch.dtype) -> None:
    """Published checkpoints have scales of blocks in bfloat16, others exponents."""
    weight = quant_weight("fp8 blocks", 320, 256)
    assert weight.scale is not None
    exponents = weight.scale.log2().round() + 127
    scale = exponents.to(dtype) if dtype == torch.uint8 else weight.scale.to(dtype)
    weight = weight._replace(scale=scale, factor=torch.arange(1.0, 4.0).repeat_interleave(128)[:320])
    for given in (weight, weight._replace(factor=None)):
        product = fp8_product(given)
        assert product is not None and product.weight.scale is not None
        assert product.weight.scale.dtype == product.scale.dtype == torch.float32
        torch.testing.assert_close(dequantize(product.weight), dequantize(given))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 128"):
        quantize_tokens(tokens(1, 256)[:, :200], GROUP)
    with pytest.raises(ConfigError, match="tokens of 192 numbers"):
        quantize_tokens(tokens(1, 384), GROUP, before="silu_and_mul")
    for before, width in (("gelu", 256), ("silu_and_mul", 513)):
        with pytest.raises(ConfigError, match=f"no activation '{before}' of {width} numbers"):
            quantize_tokens(tokens(1, 640)[:, :width], GROUP, before=before)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="apply one of them first"):
        quantize_tokens(tokens(1, 256), GROUP, InputNorm(torch.ones(256)), "relu2")
    x = tokens(1, 256)
    codes, _ = quantize_tokens(x, GROUP)
    with pytest.raises(ConfigError, match="a weight of 512 columns"):
        fp8_linear(codes, quant_weight("fp8 blocks", 64, 512), dtype=x.dtype)
    with pytest.raises(ConfigError, match="take inputs in groups"):
        fp8_linear(codes, quant_weight("fp8 rows", 64, 256), dtype=x.dtype)
    for name, group, most in (("fp8 blocks", GROUP, 128), ("fp8 rows", 256, 64)):
        codes, _ = quantize_tokens(tokens(most + 1, 256), group)
        with pytest.raises(ConfigError, match=f"at most {most} .* not {most + 1}: multiply more by torch"):
            fp8_linear(codes, quant_weight(name, 64, 256), dtype=x.dtype)


def test_what_does_not_fit_one_token_is_refused() -> None:
    weight, x = quant_weight("fp8 blocks", 64, 512), tokens(2, 512)
    with pytest.raises(ConfigError, match=r"one token of 512 numbers, not \[2, 512\]"):
        fp8_token_linear(x, weight)
    with pytest.raises(ConfigError, match=r"one token of 512 numbers, not \[1, 768\]"):
        fp8_token_linear(x[:1], weight, tail=x[:1, :256])
    with pytest.raises(ConfigError, match="concatenate x and tail first"):
        fp8_token_linear(x[:1, :256], weight, tail=x[:1, 256:], norm=InputNorm(torch.ones(512)))
    with pytest.raises(ConfigError, match=r"one dtype, not torch\.bfloat16 and torch\.float32"):
        fp8_token_linear(x[:1, :256], weight, tail=x[:1, 256:].float())
    with pytest.raises(ConfigError, match="takes e4m3 weights"):
        fp8_token_linear(x[:1], quant_weight("int4", 64, 512))
    with pytest.raises(ConfigError, match="of a multiple of 128 columns"):
        fp8_token_linear(x[:1, :192], empty_weight("fp8 rows", 64, 192))


@pytest.mark.parametrize("changes", [{"block": (128, 64)}, {"scale": torch.ones(1, 4, dtype=torch.uint8)}])
def test_scales_of_other_blocks_or_types_are_refused(changes: dict[str, Any]) -> None:
    weight, x = quant_weight("fp8 blocks", 64, 512)._replace(**changes), tokens(1, 512)
    with pytest.raises(ConfigError, match="takes float32 scales of blocks of 128 columns, not torch"):
        fp8_token_linear(x, weight)
    with pytest.raises(ConfigError, match="takes float32 scales of blocks of 128 columns, not torch"):
        fp8_linear(quantize_tokens(x, GROUP)[0], weight, dtype=x.dtype)
