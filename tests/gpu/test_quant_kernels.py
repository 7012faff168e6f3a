"""Products with weights of 8 and 4 bits at the shapes of real models in bfloat16: near the float32 reference, always
alike, and each number of a weight on its own."""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core import providers
from hybridrt.kernels.dense.moe import ExpertStack, fused_experts
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, InputNorm
from hybridrt.kernels.quant.decode_weight import decode_weight
from hybridrt.kernels.quant.fp8_linear import decoded_tokens, fp8_linear, fp8_token_linear, quantize_tokens
from hybridrt.kernels.quant.quant_experts import QuantStack, quant_experts
from hybridrt.kernels.quant.quant_experts_triton import takes_few_pairs
from hybridrt.kernels.quant.quant_linear import quant_linear
from hybridrt.kernels.quant.quant_weight import dequantize
from hybridrt.layers.quant.fp8_products import fp8_product, multiply_codes
from tests.gpu.rig import DEVICE, GPU
from tests.support.quant_weights import FORMATS, FOUR_BITS, four_bit_weight, quant_weight

pytestmark = GPU
TOLERANCE = 4e-3  # one rounding to bfloat16 is 1.7e-3 in the mean
# (rows, columns, with a norm, activation) of Falcon-H1-7B, and sizes that fill no tile.
LAYERS: tuple[tuple[int, int, bool, Activation | None], ...] = (
    (24576, 3072, True, "silu_and_mul"), (8728, 3072, True, None), (3072, 12288, False, None),
    (1000, 416, True, "relu2"),
)  # fmt: skip


def inputs(tokens: int, width: int, normed: bool, seed: int = 1) -> tuple[Tensor, InputNorm | None]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x, residual = torch.randn(2, tokens, width, generator=generator, device=DEVICE).bfloat16()
    norm_weight = torch.rand(width, generator=generator, device=DEVICE) + 0.5
    return x, InputNorm(norm_weight, 1e-5, residual) if normed else None


def copied(norm: InputNorm | None, dtype: torch.dtype = torch.bfloat16) -> InputNorm | None:
    """The norm with a residual of its own, which a product may overwrite."""
    if norm is None or norm.residual is None:
        return norm
    return norm._replace(residual=norm.residual.to(dtype, copy=True))


def error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape and bool(got.isfinite().all())
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 128])
def test_products_near_the_reference(name: str, tokens: int, record_property: Any) -> None:
    """Twice the same bits: programs that share rows add their parts in order."""
    found = {}
    for rows, width, normed, activation in LAYERS:
        weight, (x, norm) = quant_weight(name, rows, width, device=DEVICE), inputs(tokens, width, normed)
        got = [quant_linear(x, weight, norm=copied(norm), activation=activation) for _ in range(2)]
        wanted = quant_linear.reference(x.float(), weight, norm=copied(norm, torch.float32), activation=activation)
        found[f"{rows}x{width}"] = error(got[0][0], wanted[0])
        assert torch.equal(got[0][0], got[1][0])
        if got[0][1] is not None and wanted[1] is not None:
            assert error(got[0][1], wanted[1]) < TOLERANCE
    record_property("relative errors", str(found))
    # The norm is rounded to bfloat16 before a product of several tokens, and a gate multiplies two of these.
    assert max(found.values()) < 1e-2, found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 32, 64, 128])
def test_products_in_float32(name: str, tokens: int) -> None:
    """Tiles of float32 inputs fit in shared memory, and lose nothing that float32 has."""
    for rows, width, normed, activation in LAYERS[1:]:
        weight, (x, norm) = quant_weight(name, rows, width, device=DEVICE), inputs(tokens, width, normed)
        norms = [copied(norm, torch.float32) for _ in range(2)]
        got, _ = quant_linear(x.float(), weight, norm=norms[0], activation=activation)
        assert error(got, quant_linear.reference(x.float(), weight, norm=norms[1], activation=activation)[0]) < 1e-5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 64])
def test_each_number_of_a_weight(name: str, tokens: int) -> None:
    """Tokens that have a single 1 read columns of the weight: what bfloat16 holds comes out exactly."""
    rows, width = 256, 512
    weight = quant_weight(name, rows, width, device=DEVICE)
    wanted = dequantize(weight).t()
    for first in range(0, width, tokens):
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=DEVICE)
        x[:, first : first + tokens] = torch.eye(tokens, device=DEVICE)
        y, _ = quant_linear(x, weight)
        torch.testing.assert_close(y.float(), wanted[first : first + tokens], rtol=2**-7, atol=0)


@pytest.mark.parametrize("form", FOUR_BITS)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_what_is_around_a_product_of_four_bits(form: str, tokens: int) -> None:
    """Tails at a group's first column and within one, inputs that begin at no multiple of 16 bytes, biases, norms, and
    outputs that are given."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    cases: tuple[tuple[int, int, Activation | None, bool], ...] = (
        (640, 0, "silu_and_mul", True), (640, 384, None, False), (600, 424, "relu2", False), (1024, 0, None, True),
    )  # fmt: skip
    for head, tail, activation, normed in cases:
        rows, width = 1002, head + tail
        weight = four_bit_weight(form, rows, width, DEVICE)
        whole = torch.randn(tokens, width + 12, generator=generator, device=DEVICE).bfloat16()[:, 4 : 4 + width]
        bias = torch.randn(rows, generator=generator, device=DEVICE).bfloat16()
        out = torch.full((2 * tokens, rows // 2 if activation == "silu_and_mul" else rows), torch.nan, device=DEVICE)
        out, x, last = out.bfloat16(), whole[:, :head], whole[:, head:] if tail else None
        norm = inputs(tokens, width, normed)[1]
        y, _ = quant_linear(x, weight, bias, tail=last, norm=copied(norm), activation=activation, out=out[:tokens])
        wanted, _ = quant_linear.reference(
            x.float(), weight, bias.float(), tail=None if last is None else last.float(),
            norm=copied(norm, torch.float32), activation=activation,
        )  # fmt: skip
        assert y.data_ptr() == out.data_ptr() and bool(out[tokens:].isnan().all())
        assert error(y, wanted) < 1e-2, (head, tail)


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 rows", "int4", "nvfp4"])
@pytest.mark.parametrize(("rows", "width"), [(1000, 16384), (8192, 28672), (70000, 256)])
def test_one_token_of_wide_weights_and_of_many_rows(name: str, rows: int, width: int) -> None:
    """Steps of a block, and blocks of a program, for which the kernel has loops."""
    weight, (x, _) = quant_weight(name, rows, width, device=DEVICE), inputs(1, width, False)
    product: Any = fp8_token_linear if name.startswith("fp8") else quant_linear
    got = [product(x, weight)[0] for _ in range(2)]
    wanted = product.reference(x if name.startswith("fp8") else x.float(), weight)[0]
    assert torch.equal(*got) and error(got[0], wanted.float()) < 6e-3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(8728, 3072), (1001, 424)])
def test_decoded_weights_are_the_reference(name: str, shape: tuple[int, int]) -> None:
    weight = quant_weight(name, *shape, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(decode_weight(weight, dtype), dequantize(weight).to(dtype))


@pytest.mark.parametrize(("name", "rows"), [("fp8 blocks", None), ("fp8 blocks", 8), ("fp8 rows", None)])
@pytest.mark.parametrize("tokens", [2, 16, 17, 32, 33, 64, 65, 96, 113, 128, 130, 256, 3000])
def test_products_of_quantised_inputs(name: str, rows: int | None, tokens: int, record_property: Any) -> None:
    """By our kernels and by cuBLAS, which take blocks of rows and of 128 x 128, and any number of rows. 26,000 rows are
    more than a wave of the kernel with roles."""
    found = {}
    for out, width, normed, activation in (*LAYERS[:3], (1000, 512, True, "relu2"), (26000, 512, False, None)):
        weight, (x, norm) = quant_weight(name, out, width, device=DEVICE), inputs(tokens, width, normed)
        if rows is not None:
            scale = weight.scale
            assert scale is not None
            each = scale.repeat_interleave(128 // rows, 0)[: -(-out // rows)].contiguous()
            weight = weight._replace(scale=each, block=(rows, 128))
        product = fp8_product(weight)
        assert product is not None
        got = []
        for _ in range(2):
            codes, total = quantize_tokens(x, product.group, copied(norm))
            got.append(multiply_codes(product, codes, None, activation, torch.bfloat16))
        exact, sum_of = quantize_tokens.reference(x, product.group, copied(norm))
        wanted = F.linear(decoded_tokens(exact), dequantize(weight))
        wanted = wanted if activation is None else ACTIVATIONS[activation].reference(wanted)
        found[f"{out}x{width}"] = error(got[0], wanted)
        assert torch.equal(*got) and (total is None) == (sum_of is None)
        if total is not None and sum_of is not None:
            assert torch.equal(total, sum_of)
    record_property("relative errors", str(found))
    assert max(found.values()) < 6e-3, found


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 rows"])
@pytest.mark.parametrize("form", ["plain", "tail", "norm", "norm and residual"])
def test_products_of_one_token_that_is_quantised(form: str, name: str, record_property: Any) -> None:
    found = {}
    # Sizes of Falcon-H1-7B; a last part of columns, and a last block of rows, that are partly there; and one row more
    # than programs that run at a time.
    shapes: tuple[tuple[int, int, Activation | None], ...] = (
        (24576, 3072, "silu_and_mul"), (8728, 3072, None), (3072, 12288, None), (3072, 4608, None),
        (1002, 640, "relu2"), (4226, 512, "silu_and_mul"),
    )  # fmt: skip
    for out, width, activation in shapes:
        bias = torch.randn(out, device=DEVICE).bfloat16() if width % 1024 else None
        weight, (x, norm) = quant_weight(name, out, width, device=DEVICE), inputs(1, width, "norm" in form)
        if norm is not None and form == "norm":
            norm = norm._replace(residual=None)
        head, tail = (x[:, : width - 200], x[:, width - 200 :]) if form == "tail" else (x, None)
        options: dict[str, Any] = {"tail": tail, "activation": activation}
        got = [fp8_token_linear(head, weight, bias, norm=copied(norm), **options) for _ in range(2)]
        wanted, total = fp8_token_linear.reference(head, weight, bias, norm=copied(norm), **options)
        found[f"{out}x{width}"] = error(got[0][0], wanted.float())
        assert torch.equal(got[0][0], got[1][0])
        torch.testing.assert_close(got[0][1], total, rtol=0, atol=0)  # None as well
    record_property("relative errors", str(found))
    assert max(found.values()) < 6e-3, found


@pytest.mark.parametrize("tokens", [3, 256, 3000])
@pytest.mark.parametrize("before", ["silu_and_mul", "relu2"])
@pytest.mark.parametrize("group", [128, 12288])
def test_an_activation_is_quantised(group: int, before: Activation, tokens: int) -> None:
    x = inputs(tokens, 24576 if before == "silu_and_mul" else 12288, False)[0]
    got, wanted = quantize_tokens(x, group, before=before)[0], quantize_tokens.reference(x, group, before=before)[0]
    stored = quantize_tokens(ACTIVATIONS[before](x), group)[0]
    for exact in (wanted, stored):
        assert error(decoded_tokens(got), decoded_tokens(exact)) < 3e-3  # codes next to ties


@pytest.mark.parametrize(("rows", "width", "activation"), [(3072, 12288, None), (1000, 4608, "silu_and_mul")])
@pytest.mark.parametrize("tokens", [48, 128])
def test_parts_of_products_are_always_added_alike(
    rows: int, width: int, activation: Activation | None, tokens: int
) -> None:
    """Next to other work, so that programs of a product do not all run at a time; captured, and not."""
    weight, (x, _) = quant_weight("fp8 blocks", rows, width, device=DEVICE), inputs(tokens, width, False)
    bias, other = torch.randn(rows, device=DEVICE).bfloat16(), torch.randn(4096, 4096, device=DEVICE).bfloat16()
    codes, _ = quantize_tokens(x, 128)
    wanted = fp8_linear(codes, weight, bias, dtype=torch.bfloat16, activation=activation)
    exact = fp8_linear.reference(codes, weight, bias, dtype=torch.bfloat16, activation=activation)
    assert error(wanted, exact) < 6e-3
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = fp8_linear(codes, weight, bias, dtype=torch.bfloat16, activation=activation)
    for _ in range(100):
        with torch.cuda.stream(side):
            torch.mm(other, other)
        found = [fp8_linear(codes, weight, bias, dtype=torch.bfloat16, activation=activation) for _ in range(4)]
        graph.replay()
        assert all(torch.equal(each, wanted) for each in (*found, captured))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 32, 400, 3000])
def test_experts_near_the_reference(name: str, tokens: int, record_property: Any) -> None:
    count, width, inner, top_k = 64, 2048, 512, 8
    up, down = (quant_weight(name, *shape, count, device=DEVICE) for shape in ((2 * inner, width), (width, inner)))
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(tokens, width, generator=generator, device=DEVICE).bfloat16()
    ids = torch.rand(tokens, count, generator=generator, device=DEVICE).argsort(1)[:, :top_k].int()
    ids[0, 3] = -1
    weights = torch.rand(tokens, top_k, generator=generator, device=DEVICE)
    experts = QuantStack(up, down, "silu")
    got, wanted = quant_experts(x, experts, weights, ids), quant_experts.reference(x.float(), experts, weights, ids)
    record_property("relative error", f"{error(got, wanted):.1e}")
    assert error(got, wanted) < 1e-2  # hidden activations are rounded to bfloat16 on the way
    assert torch.equal(got, quant_experts(x, experts, weights, ids))


@pytest.mark.parametrize("name", ["", *FORMATS])
@pytest.mark.parametrize("tokens", [1, 32, 1024])
def test_experts_in_float32(name: str, tokens: int) -> None:
    """ "": experts that are float32 themselves."""
    x, weights, ids = routed(tokens, 32, 1024, 4)
    shapes, x = ((1024, 1024), (1024, 512)), x.float()
    if not name:
        up, down = (torch.randn(32, *shape, device=DEVICE) / 30 for shape in shapes)
        stack = ExpertStack(up, down, "silu")
        assert error(fused_experts(x, stack, weights, ids), fused_experts.reference(x, stack, weights, ids)) < 1e-5
        return
    w_up, w_down = (quant_weight(name, *shape, 32, device=DEVICE) for shape in shapes)
    experts = QuantStack(w_up, w_down, "silu")
    assert error(quant_experts(x, experts, weights, ids), quant_experts.reference(x, experts, weights, ids)) < 1e-5


FEW_PAIRS = ["fp8 blocks", "fp8 rows", "int4", "int4 zeros", "nvfp4", "mxfp4"]


def routed(tokens: int, count: int, width: int, top_k: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weights and experts of tokens; the first token has no expert in one place."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator, device=DEVICE).bfloat16()
    ids = torch.rand(tokens, count, generator=generator, device=DEVICE).argsort(1)[:, :top_k].int()
    ids[0, top_k // 2] = -1
    return x, torch.rand(tokens, top_k, generator=generator, device=DEVICE), ids


@pytest.mark.parametrize("name", FEW_PAIRS)
@pytest.mark.parametrize(
    ("tokens", "count", "width", "inner", "activation"),
    [
        (1, 32, 1536, 1408, "silu"),
        (2, 64, 2944, 128, "relu2"),
        (30, 64, 3072, 384, "silu"),
        (60, 32, 1280, 512, "relu2"),
        (4, 32, 6144, 256, "silu"),
    ],
)
def test_experts_with_few_pairs(
    name: str, tokens: int, count: int, width: int, inner: int, activation: Literal["silu", "relu2"]
) -> None:
    """Pairs that are apart, and in blocks of 8 and of 16; groups of columns that fill no round and no part; biases and
    clamps; memory of which nothing is set before."""
    rows = 2 * inner if activation == "silu" else inner
    up, down = (quant_weight(name, *shape, count, device=DEVICE) for shape in ((rows, width), (width, inner)))
    x, weights, ids = routed(tokens, count, width, 6)
    biases = [torch.randn(count, n, device=DEVICE).bfloat16() for n in (rows, width)]
    assert width < 6144 or takes_few_pairs(up, x.dtype, ids.numel() / count) == (up.code == "e2m1")
    clamps = ((None, None), (2.0, None), (2.0, 1.7)) if activation == "silu" else ((None, None),)
    for limit, alpha in clamps:
        experts = QuantStack(up, down, activation, limit, alpha, *biases)
        exact = experts._replace(b_up=biases[0].float(), b_down=biases[1].float())
        wanted = quant_experts.reference(x.float(), exact, weights, ids)
        for garbage in (-(1 << 30), 0x7FC07FC0):  # no pair; and, in bfloat16, NaN
            del [torch.full((1 << size,), garbage, dtype=torch.int32, device=DEVICE) for size in range(8, 20)][:]
            assert error(quant_experts(x, experts, weights, ids), wanted) < 1e-2
    plain = QuantStack(up, down, activation)
    assert error(quant_experts(x, plain, weights, ids), quant_experts.reference(x.float(), plain, weights, ids)) < 1e-2


@pytest.mark.parametrize("name", FEW_PAIRS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_with_inputs_of_any_size(name: str, tokens: int) -> None:
    """Squared ReLU of inputs times a power of two: results are multiplied with its square, bit by bit."""
    up, down = (quant_weight(name, *shape, 64, device=DEVICE) for shape in ((256, 512), (512, 256)))
    x, weights, ids = routed(tokens, 64, 512, 6)
    experts = QuantStack(up, down, "relu2")
    usual = quant_experts(x, experts, weights, ids)
    for power in (-20, 20):
        assert torch.equal(quant_experts(x * 2.0**power, experts, weights, ids), usual * 4.0**power)


@pytest.mark.parametrize("name", ["fp8 blocks", "int4", "nvfp4"])
def test_a_product_that_is_captured_first(name: str) -> None:
    """Counters of a weight that no step has used before its capture: replays and eager calls agree."""
    weight, (x, _) = quant_weight(name, 2048, 3072, device=DEVICE), inputs(8, 3072, False)
    wanted = providers.select("quant_linear", DEVICE)(x, weight._replace(data=weight.data.clone()))[0]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = quant_linear(x, weight)[0]
    for _ in range(2):
        assert torch.equal(quant_linear(x, weight)[0], wanted)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, wanted)
