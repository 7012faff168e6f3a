"""Quantised layers in the layout of kernels, with the kernels' references in place of them on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridrt.base.errors import BackendError, ConfigError
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation
from hybridrt.kernels.quant.fp8_linear import MAX_TOKENS, quantize_tokens
from hybridrt.layers.linear import MLP, ColumnLinear, MixedMethod, RowLinear, Segment, VocabParallelEmbedding, finish
from hybridrt.layers.moe import Experts
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.quant import kernel_weight, methods
from hybridrt.layers.quant.packed_weight import PackedWeight
from tests.layers.test_quantised_layers import RANKS, build_of, fill
from tests.support.quantised import KINDS, awq, gptq, of_fp8, of_integers

F16 = torch.float16
# Kernels take groups of 16 inputs and of multiples of 32.
WIDER = {
    "fp8-blocks": of_fp8(Scheme("fp8", "fp8", (8, 32)), "weight_scale_inv"),
    "int4-zeros": of_integers(Scheme("int4", "compressed-packed", (1, 32), zeros=True)),
    "int8-packed": of_integers(Scheme("int8", "compressed-packed", (1, 32))),
    "awq": awq(Scheme("int4", "awq", (1, 32), scale_dtype=F16, zeros=True)),
    "gptq8": gptq(Scheme("int8", "gptq", (1, 32), scale_dtype=F16, zeros=True, indexed=True)),
    **{kind: KINDS[kind] for kind in ("fp8-rows", "fp8-tensor", "mxfp8", "int8-rows", "int4-rows", "nvfp4", "mxfp4")},
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "KERNELS_ON", ("cpu",))


@pytest.mark.parametrize("tp", RANKS, ids=["one", "first", "second"])
@pytest.mark.parametrize("kind", WIDER)
def test_linear_layers(kind: str, tp: TPGroup) -> None:
    """Few tokens and many, with a norm before; q begins and v ends within a block."""
    torch.manual_seed(1)
    qk, v = WIDER[kind](24, 96), WIDER[kind](8, 96)
    segments = [Segment("q", 14), Segment("k", 10, 1), Segment("v", 8)]
    layer = ColumnLinear("qkv", 96, segments, build=build_of(qk.scheme, tp))
    fill(layer.targets("qk", ["q", "k"]) | layer.targets("v", ["v"], scale={"v": 3.0}), {"qk": qk, "v": v})
    finish(layer)
    method = layer.method
    assert isinstance(method, methods.QuantMethod) and method.kernel is not None
    assert {name for name, _ in layer.named_parameters()} == set(method.parameters())
    q, k = qk.dense.split([14, 10])
    dense = torch.cat([tp.shard(q, 0), k, tp.shard(v.dense, 0) * 3.0])
    norm = RMSNorm("norm", 96, 1e-5, device=torch.device("cpu"))
    norm.weight.data.uniform_(0.5, 1.5)
    for tokens in (3, 130):
        x, residual = torch.randn(tokens, 96), torch.randn(tokens, 96)
        torch.testing.assert_close(layer(x, "relu2"), (x @ dense.t()).relu().square(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.method.apply(x[:, :40], None, tail=x[:, 40:]), x @ dense.t())
        y, total = method.apply_normed(norm, x, residual.clone(), None)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(y, norm(x + residual)[0] @ dense.t())


def test_a_weight_that_kernels_would_read_wrongly_is_refused() -> None:
    matrix = WIDER["fp8-blocks"](24, 96)
    layer = ColumnLinear("up", 96, [Segment("up", 24)], build=build_of(matrix.scheme))
    fill(layer.targets("up", ["up"]), {"up": matrix})
    assert isinstance(layer.method, methods.QuantMethod)
    layer.method.weight.scales.data = layer.method.weight.scales.data[:, :, :2]
    with pytest.raises(ConfigError, match=r"the scale of blocks \[8, 32\] is \[3, 3\], not \[3, 2\]"):
        finish(layer)


def test_many_tokens_decode_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.layers.quant.kernel_weight.NUMBERS", 1)  # 128 rows
    for kind in ("fp8-blocks", "fp8-tensor", "nvfp4"):
        matrix = WIDER[kind](300, 96)
        layer = ColumnLinear("up", 96, [Segment("up", 300)], build=build_of(matrix.scheme))
        fill(layer.targets("up", ["up"]), {"up": matrix})
        finish(layer)
        x, bias = torch.randn(130, 96), torch.randn(300)
        torch.testing.assert_close(layer(x), x @ matrix.dense.t())
        torch.testing.assert_close(layer.method.apply(x, bias), x @ matrix.dense.t() + bias)


def decoded_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, kind_a: object, scale_b: torch.Tensor, kind_b: object,
    *, output_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.scaled_mm, with the shapes and strides that cuBLAS takes."""
    kinds, (tokens, width), rows = torch.nn.functional.ScalingType, a.shape, b.shape[1]
    assert tokens % 16 == rows % 16 == 0 and a.is_contiguous() and b.t().is_contiguous()
    if kind_a == kinds.RowWise:
        assert scale_a.shape == (tokens, 1) and scale_b.shape == (1, rows)
        x, w = a.float() * scale_a, b.t().float() * scale_b.t()
    else:
        assert scale_a.shape == (tokens, width // 128) and scale_a.stride(0) == 1
        x = a.float() * scale_a.repeat_interleave(128, 1)
        if kind_b == kinds.BlockWise128x128:
            padded = -(-width // 512) * 4
            assert scale_b.shape == (padded, -(-rows // 128)) and scale_b.stride() == (1, padded)
            each = scale_b[: width // 128].t().repeat_interleave(128, 0)[:rows]
        else:
            assert scale_b.shape == (rows, width // 128) and scale_b.stride(0) == 1
            each = scale_b
        w = b.t().float() * each.repeat_interleave(128, 1)
    return (x.nan_to_num() @ w.t()).to(output_dtype)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("rows", [256, 24])
@pytest.mark.parametrize("kind", ["blocks", "rows", "tensor"])
def test_quantised_inputs(kind: str, rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """v begins within a block. The checkpoint says whether inputs are quantised."""
    torch.manual_seed(4)
    monkeypatch.setattr(methods, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", decoded_product)
    block = {"blocks": (128, 128), "rows": (1, 0), "tensor": (0, 0)}[kind]
    matrix = of_fp8(Scheme("fp8", "fp8", block, activations="group"), "weight_scale_inv")
    u, v = matrix(rows, 384), matrix(40, 384)
    found = []
    for activations in ("group", ""):
        build = replace(build_of(replace(u.scheme, activations=activations)), dtype=torch.bfloat16)
        layer = ColumnLinear("uv", 384, [Segment("u", rows), Segment("v", 40)], build=build)
        fill(layer.targets("u", ["u"]) | layer.targets("v", ["v"]), {"u": u, "v": v})
        finish(layer)
        method = layer.method
        assert isinstance(method, methods.Fp8) and (method.product is not None) == bool(activations)
        x = torch.randn(tokens, 384, generator=torch.Generator().manual_seed(5)).bfloat16()
        norm = RMSNorm("norm", 384, 1e-5, device=torch.device("cpu"))
        norm.weight.data.fill_(1.0)
        y, total = method.apply_normed(norm, x, x.clone(), None, "relu2")
        assert torch.equal(total, x + x)
        found.append((layer(x).float(), y.float(), method.apply(x[:, :128], None, tail=x[:, 128:]).float()))
    exact = x.float() @ torch.cat([u.dense, v.dense]).t()
    for got, wanted in zip(*found, strict=True):
        assert 0.003 < (got - wanted).norm() / wanted.norm() < 0.06  # inputs have four bits
    assert (found[1][0] - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("heights", [(256,), (256, 40)], ids=["factors of blocks", "of rows"])
def test_multipliers_of_blocks(heights: tuple[int, ...], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's multipliers leave inputs quantised. The second of two parts begins within a block of the first."""
    torch.manual_seed(6)
    monkeypatch.setattr(methods, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", decoded_product)
    write = of_fp8(Scheme("fp8", "fp8", (128, 128), activations="group"), "weight_scale_inv")
    matrices = {f"part{i}": write(height, 256) for i, height in enumerate((*heights, 128))}
    build = replace(build_of(matrices["part0"].scheme), dtype=torch.bfloat16)
    sizes = [Segment(name, len(matrix.dense)) for name, matrix in matrices.items()]
    layer = ColumnLinear("in", 256, sizes, build=build)
    scale = {name: 0.25 + i for i, name in enumerate(matrices)}
    fill({k: v for name in matrices for k, v in layer.targets(name, [name], scale=scale).items()}, matrices)
    finish(layer)
    assert isinstance(layer.method, methods.Fp8) and layer.method.product is not None
    assert layer.method.product.square == (len(heights) == 1)
    x = torch.randn(tokens, 256).bfloat16()
    exact = x.float() @ torch.cat([matrix.dense * scale[name] for name, matrix in matrices.items()]).t()
    for got, wanted in zip(layer(x).float().split([len(m.dense) for m in matrices.values()], 1),
                           exact.split([len(m.dense) for m in matrices.values()], 1), strict=True):  # fmt: skip
        assert (got - wanted).norm() / wanted.norm() < 0.06


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize(("widths", "block"), [((256, 384), 128), ((256, 96), 128), ((256, 384), 0), ((128, 384), 0)])
def test_inputs_of_several_matrices(
    widths: tuple[int, int], block: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product where blocks of 128 inputs have scales. A row's scale serves one matrix, and so does a last block
    that is not full."""
    torch.manual_seed(7)
    monkeypatch.setattr(methods, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", decoded_product)
    scheme = Scheme("fp8", "fp8", (128, 128) if block else (1, 0), activations="group")
    names = {"attn": widths[0], "ssm": widths[1]}
    matrices = {name: of_fp8(scheme, "weight_scale_inv")(200, width) for name, width in names.items()}
    layer = RowLinear(
        "out", [Segment(*item) for item in names.items()], 200, build=replace(build_of(scheme), dtype=torch.bfloat16)
    )
    fill(layer.targets("attn", "attn") | layer.targets("ssm", "ssm", scale=2.0), matrices)
    finish(layer)
    assert isinstance(layer.method, MixedMethod)
    assert len(layer.method.runs) == (1 if block and widths[1] % 128 == 0 else 2)
    assert {name for name, _ in layer.named_parameters()} == set(layer.method.parameters())
    x, tail = torch.randn(tokens, widths[0]).bfloat16(), torch.randn(tokens, widths[1]).bfloat16()
    wanted = x.float() @ matrices["attn"].dense.t() + tail.float() @ matrices["ssm"].dense.t() * 2.0
    found = layer(x, tail).float()
    assert (found - wanted).norm() / wanted.norm() < 0.06
    assert torch.equal(layer(torch.cat([x, tail], 1)).float(), found)


@pytest.mark.parametrize("tokens", [3, 130])
@pytest.mark.parametrize("activation", ["silu_and_mul", "relu2"])
def test_an_activation_is_applied_while_its_results_are_quantised(
    activation: Activation, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no product has it: with more tokens than our kernel takes. Silu rounds its factors on a CPU."""
    torch.manual_seed(8)
    monkeypatch.setattr(methods, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", decoded_product)
    seen = list[Activation | None]()

    def quantize(*args: Any, before: Activation | None = None) -> Any:
        seen.append(before)
        return quantize_tokens(*args, before=before)

    monkeypatch.setattr(methods, "quantize_tokens", quantize)
    write = of_fp8(Scheme("fp8", "fp8", (128, 128), activations="group"), "weight_scale_inv")
    parts = ["gate", "up"] if activation == "silu_and_mul" else ["up"]
    matrices = {f"mlp.{part}_proj": write(256, 128) for part in parts} | {"mlp.down_proj": write(128, 256)}
    build = replace(build_of(matrices["mlp.up_proj"].scheme), dtype=torch.bfloat16)
    mlp = MLP("mlp", 128, 256, activation=activation, build=build)
    fill(mlp.targets("mlp"), matrices)
    finish(mlp)
    norm = RMSNorm("norm", 128, 1e-5, device=torch.device("cpu"))
    norm.weight.data.fill_(1.0)
    x, residual = torch.randn(2, tokens, 128).bfloat16()
    later, found = activation if tokens > MAX_TOKENS else None, []
    for _ in range(2):
        summed, rest = mlp(norm, x, residual.clone(), None)
        assert isinstance(summed, torch.Tensor) and rest is not None
        found.append((summed, rest, mlp.summand(x)))
        mlp.down.method.activates = False
    for together, apart in zip(*found, strict=True):
        assert (together.float() - apart.float()).norm() <= (0.03 if later == "silu_and_mul" else 0) * apart.norm()
    assert seen == [None, later, None, later, None, None, None, None]
    hidden = x.float() @ torch.cat([matrices[f"mlp.{part}_proj"].dense for part in parts]).t()
    exact = ACTIVATIONS[activation].reference(hidden) @ matrices["mlp.down_proj"].dense.t()
    assert (found[0][2].float() - exact).norm() / exact.norm() < 0.1


def test_a_plain_product_keeps_the_activation_that_it_fuses() -> None:
    """With the few tokens for which it is one kernel on a GPU, norm included."""
    build = replace(build_of(PLAIN), dtype=torch.bfloat16)
    up = ColumnLinear("up", 64, [Segment("gate", 8192), Segment("up", 8192)], build=build).method
    counts = (1, 32, 33, 64, 65)
    assert not any(up.fuses_activation(count, "silu_and_mul") for count in counts), "there is no such kernel on a CPU"
    up.skinny = True  # type: ignore[attr-defined]
    assert [count for count in counts if up.fuses_activation(count, "silu_and_mul")] == [1, 32, 33, 64]


@pytest.mark.parametrize("kind", WIDER)
def test_embeddings(kind: str) -> None:
    torch.manual_seed(2)
    matrix = WIDER[kind](32, 96)
    embed = VocabParallelEmbedding("embed", 32, 96, build=build_of(matrix.scheme))
    fill(embed.targets("embed"), {"embed": matrix})
    finish(embed)
    ids = torch.tensor([3, 31, 0, 3])
    torch.testing.assert_close(embed(ids), matrix.dense[ids])


@pytest.mark.parametrize("tp", RANKS[:2], ids=["one", "first"])
@pytest.mark.parametrize("kind", WIDER)
def test_experts(kind: str, tp: TPGroup) -> None:
    torch.manual_seed(3)
    made = {f"x.{e}.{name}_proj": WIDER[kind](64, 96) for e in range(3) for name in ("gate", "up")}
    downs = {f"x.{e}.down_proj": WIDER[kind](96, 64) for e in range(3)}
    scheme = next(iter(made.values())).scheme
    layer = Experts("experts", 3, 96, 64, activation="silu", build=build_of(scheme, tp))
    fill(layer.targets("x"), made | downs)
    packed = replace(layer.method.up.packed.scheme)  # type: ignore[attr-defined]
    x, weights = torch.randn(3, 96), torch.rand(3, 2)
    ids = torch.tensor([[0, 2], [2, 0], [2, -1]], dtype=torch.int32)
    expected = layer(x, weights, ids)
    finish(layer)
    assert layer.method.kernels is not None and packed == scheme  # type: ignore[attr-defined]
    torch.testing.assert_close(layer(x, weights, ids), expected, rtol=1e-5, atol=1e-6)


def test_the_search_for_kernels_stores_a_stack_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta" a block takes 3 ms, and a model may have ten thousand experts. Elsewhere blocks are as all at once."""
    scheme, pack, blocks = WIDER["nvfp4"](24, 64).scheme, kernel_weight.pack_planes, list[int]()
    monkeypatch.setattr(
        kernel_weight, "pack_planes", lambda codes, code: blocks.append(len(codes)) or pack(codes, code)
    )
    on_host, on_meta = (
        PackedWeight(scheme, (24,), 64, replace(build_of(scheme), device=torch.device(device)), count=5)
        for device in ("cpu", "meta")
    )
    on_host.codes.data.random_()
    found = [kernel_weight.kernel_weight(on_host)]
    monkeypatch.setattr(kernel_weight, "NUMBERS", 50 * 64)
    found += [kernel_weight.kernel_weight(each) for each in (on_host, on_meta)]
    whole, by_blocks, empty = (each.data for each in found if each is not None)
    assert blocks == [120, 50, 50, 20, 120]
    assert torch.equal(by_blocks, whole) and empty.shape == whole.shape == (5, 24, 8)


def test_groups_without_a_kernel() -> None:
    """A linear layer decodes; experts are refused, before any weight is read."""
    matrix = KINDS["int4-groups"](24, 40)
    layer = ColumnLinear("up", 40, [Segment("up", 24)], build=build_of(matrix.scheme))
    fill(layer.targets("up", ["up"]), {"up": matrix})
    finish(layer)
    x = torch.randn(3, 40)
    torch.testing.assert_close(layer(x), x @ matrix.dense.t())
    text = r"layers\.3\.experts has int4 by 8 inputs of 40 inputs and .* of 24 inputs; .* groups of 16 inputs"
    with pytest.raises(BackendError, match=text):
        Experts("layers.3.experts", 2, 40, 24, activation="silu", build=build_of(matrix.scheme))
    eight, mixed = (
        build_of(KINDS["int8-rows"](8, 40).scheme),
        build_of(WIDER["int4-zeros"](8, 64).scheme, plain=("down",)),
    )
    with pytest.raises(BackendError, match="int8 by row of 42 inputs"):
        Experts("experts", 2, 40, 42, activation="silu", build=eight)
    with pytest.raises(BackendError, match="and dense of 64 inputs"):
        Experts("experts", 2, 64, 64, activation="silu", build=mixed)


def test_experts_whose_inputs_are_out_of_order() -> None:
    """Only `g_idx` tells, once it is read."""
    kind = gptq(Scheme("int4", "gptq", (1, 32), scale_dtype=F16, zeros=True, indexed=True), shuffled=True)
    made = {f"x.{e}.{name}_proj": kind(64, 64) for e in (0, 1) for name in ("gate", "up", "down")}
    layer = Experts("layers.3.experts", 2, 64, 64, activation="silu", build=build_of(kind(64, 64).scheme))
    fill(layer.targets("x"), made)
    with pytest.raises(BackendError, match=r"layers\.3\.experts has int4 by 32 inputs of 64 inputs"):
        finish(layer)
