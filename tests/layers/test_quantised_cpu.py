"""Products of int4 and int8 weights by kernels of torch, in bfloat16 models on a CPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridrt.base.quantization import Scheme
from hybridrt.layers.linear import ColumnLinear, Segment, VocabParallelEmbedding, finish
from hybridrt.layers.moe import Experts
from hybridrt.layers.quant.methods import QuantExperts, QuantMethod
from hybridrt.layers.quant.packed_weight import PackedWeight
from hybridrt.layers.weights import Build
from tests.layers.test_quantised_layers import build_of, fill
from tests.support.quantised import Written, awq, of_integers

BF16 = torch.bfloat16


def int4(block: int, layout: str = "compressed-packed", zeros: bool = False) -> Callable[..., Written]:
    kind = awq if layout == "awq" else of_integers
    dtype = torch.float16 if layout == "awq" else torch.float32
    return kind(Scheme("int4", layout, (1, block), scale_dtype=dtype, zeros=zeros))


WEIGHTS = {
    "int4 by 32": int4(32),
    "int4 by 64 with zeros": int4(64, zeros=True),
    "int4 by 96": int4(96),
    "int4 by row": int4(0),
    "awq": int4(32, "awq", zeros=True),
    "int8 by row": of_integers(Scheme("int8", "compressed", (1, 0))),
}


def half(build: Build) -> Build:
    return replace(build, dtype=BF16)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("no block is decoded")

    monkeypatch.setattr(PackedWeight, "decoded", refuse)


def close(found: Tensor, dense: Tensor) -> None:
    assert float((found.float() - dense).norm() / dense.norm()) < 0.01


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_linear_layers(kind: str, tokens: int, no_decoding: None) -> None:
    """Parts with scales of their own, a multiplier and a bias."""
    torch.manual_seed(2)
    a, b = WEIGHTS[kind](544, 192), WEIGHTS[kind](16, 192)
    layer = ColumnLinear("ab", 192, [Segment("a", 544), Segment("b", 16, bias=True)], build=half(build_of(a.scheme)))
    targets, bias = layer.targets("a", ["a"]) | layer.targets("b", ["b"], scale={"b": 3.0}), torch.randn(16)
    targets.pop("b.bias")[0].fill("b.bias", bias)
    fill(targets, {"a": a, "b": b})
    finish(layer)
    x = torch.randn(tokens, 192).to(BF16)
    dense = torch.cat((x.float() @ a.dense.t(), x.float() @ b.dense.t() * 3 + bias), 1)
    found = layer(x)
    assert found.dtype == BF16
    for part, meant in zip(found.split([544, 16], 1), dense.split([544, 16], 1), strict=True):
        close(part, meant)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_experts(kind: str, no_decoding: None) -> None:
    torch.manual_seed(3)
    made = {f"{e}.{name}_proj": WEIGHTS[kind](192, 192) for e in range(3) for name in ("gate", "up", "down")}
    layer = Experts("x", 3, 192, 192, activation="silu", build=half(build_of(made["0.up_proj"].scheme)))
    fill(layer.targets("x"), {f"x.{key}": matrix for key, matrix in made.items()})
    finish(layer)
    x, weights = torch.randn(4, 192).to(BF16), torch.rand(4, 1)
    ids = torch.tensor([[0], [2], [0], [2]], dtype=torch.int32)
    rows = []
    for row, e, weight in zip(x.float(), (0, 2, 0, 2), weights):
        gate, up, down = (made[f"{e}.{name}_proj"].dense for name in ("gate", "up", "down"))
        rows.append(weight * (torch.nn.functional.silu(gate @ row) * (up @ row) @ down.t()))
    close(layer(x, weights, ids), torch.stack(rows))
    assert isinstance(layer.method, QuantExperts)


def stored(kind: Callable[..., Written], rows: int, dtype: torch.dtype) -> PackedWeight:
    matrix = kind(rows, 192)
    layer = ColumnLinear("a", 192, [Segment("a", rows)], build=replace(build_of(matrix.scheme), dtype=dtype))
    fill(layer.targets("a", ["a"]), {"a": matrix})
    before = {name: p.nbytes for name, p in layer.named_parameters()}
    finish(layer)
    assert isinstance(layer.method, QuantMethod)
    after = {name: p.nbytes for name, p in layer.named_parameters()}
    assert before["codes"] <= after["codes"] < before["codes"] + 16 * 96, "rows of zeros at most"
    x = torch.randn(3, 192).to(dtype)
    close(layer(x), x.float() @ matrix.dense.t())
    assert layer(x[:0]).shape == (0, rows)
    return layer.method.weight


def test_which_weights_are_stored_anew() -> None:
    """The others are decoded: float32 is exact, and torch's kernel takes no other sizes."""
    assert stored(int4(32), 32, BF16).for_torch is not None
    assert stored(int4(32), 32, torch.float32).for_torch is None
    assert stored(int4(32), 24, BF16).for_torch is not None
    assert stored(int4(16), 32, BF16).for_torch is None


def test_a_head_that_is_not_looked_up(no_decoding: None) -> None:
    matrix = int4(32)(48, 192)
    head = VocabParallelEmbedding("head", 48, 192, looks_up=False, build=half(build_of(matrix.scheme)))
    fill(head.targets("head"), {"head": matrix})
    finish(head)
    x = torch.randn(2, 192).to(BF16)
    close(head.logits(x), x.float() @ matrix.dense.t())


def test_an_embedding_can_still_be_looked_up() -> None:
    matrix = int4(32)(48, 192)
    embed = VocabParallelEmbedding("embed", 48, 192, build=half(build_of(matrix.scheme)))
    fill(embed.targets("embed"), {"embed": matrix})
    finish(embed)
    ids = torch.tensor([3, 47, 0])
    close(embed(ids), matrix.dense[ids])
    x = torch.randn(2, 192).to(BF16)
    close(embed.logits(x), x.float() @ matrix.dense.t())
