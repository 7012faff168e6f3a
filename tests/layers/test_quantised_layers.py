"""Quantised linear layers, embeddings and experts of each format against the float32 matrices that their codes mean."""

import random

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import CheckpointError
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, VocabParallelEmbedding, finish
from hybridrt.layers.moe import Experts
from hybridrt.layers.quant.packed_weight import PackedWeight
from hybridrt.layers.quant.pieces import PackedPiece, check_codes, decoded
from hybridrt.layers.weights import Build, CheckpointMap
from tests.support.live_bytes import LiveBytes
from tests.support.quantised import KINDS, Written, gptq, of_integers

# Blocks of 4 x 8 and groups of 8, 16 and 32: two ranks cut each of them.
WIDTH = {"fp8-blocks": 42, "fp8-exponents": 42, "int4-rows": 42, "nvfp4": 48, "nvfp4-ct": 48, "mxfp4": 96, "mxfp8": 96}
RANKS = [TPGroup(), TPGroup(0, 2), TPGroup(1, 2)]


def build_of(scheme: Scheme, tp: TPGroup = RANKS[0], plain: tuple[str, ...] = ()) -> Build:
    schemes = lambda part: PLAIN if part.endswith(plain or ("nothing",)) else scheme  # noqa: E731
    return Build(tp, torch.float32, torch.device("cpu"), schemes, quantised=True)


def fill(targets: CheckpointMap, matrices: dict[str, Written | Tensor]) -> None:
    """Tensors come in any order."""
    assert set(targets) == {f"{key}.weight" for key in matrices}
    loads = []
    for key, matrix in matrices.items():
        for piece in targets[f"{key}.weight"]:
            if isinstance(matrix, Tensor):
                piece.fill(key, matrix)
            else:
                loads += [(piece, matrix.module(key), last, t) for last, t in matrix.tensors.items()]
    random.Random(1).shuffle(loads)
    for piece, module, last, tensor in loads:
        assert isinstance(piece, PackedPiece)
        piece.fill(module, last, tensor)


@pytest.mark.parametrize("tp", RANKS, ids=["one", "first", "second"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_output(kind: str, tp: TPGroup) -> None:
    """A matrix holds q and k, which ranks cut within blocks; that of v has scales of its own, and a multiplier."""
    torch.manual_seed(3)
    width = WIDTH.get(kind, 40)
    qk, v = KINDS[kind](24, width), KINDS[kind](8, width)
    segments = [Segment("q", 14), Segment("k", 10, 1), Segment("v", 8)]
    layer = ColumnLinear("qkv", width, segments, build=build_of(qk.scheme, tp))
    turned = lambda t: t.flip(0)  # noqa: E731  # rows are not in the checkpoint's order
    targets = layer.targets("qk", ["q", "k"], rearrange=turned) | layer.targets("v", ["v"], scale={"v": 3.0})
    fill(targets, {"qk": qk, "v": v})
    finish(layer)
    q, k = qk.dense.flip(0).split([14, 10])
    dense = torch.cat([tp.shard(q, 0), k, tp.shard(v.dense, 0) * 3.0])
    x = torch.randn(3, width)
    torch.testing.assert_close(layer(x), x @ dense.t())
    weight = layer.method.weight  # type: ignore[attr-defined]  # not in runs, because the scheme is one
    torch.testing.assert_close(torch.cat([weight.dequantize(*rows) for rows in weight.row_ranges()]), dense)


@pytest.mark.parametrize("tp", RANKS, ids=["one", "first", "second"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_input(kind: str, tp: TPGroup) -> None:
    """Ranks cut the inputs within groups. A second matrix of the same scheme, and a plain one, are added."""
    torch.manual_seed(4)
    width = WIDTH.get(kind, 40)
    a, b, c = KINDS[kind](16, width), KINDS[kind](16, width), torch.randn(16, 6)
    segments = [Segment("a", width), Segment("b", width), Segment("c", 6)]
    layer = RowLinear("out", segments, 16, build=build_of(a.scheme, tp, plain=(".c",)))
    fill(
        {**layer.targets("a", "a"), **layer.targets("b", "b", scale=0.5), **layer.targets("c", "c")},
        {"a": a, "b": b, "c": c},
    )
    finish(layer)
    dense = torch.cat([tp.shard(t, 1) for t in (a.dense, b.dense * 0.5, c)], 1)
    x = torch.randn(3, dense.shape[1])
    torch.testing.assert_close(layer(x, reduce=False), x @ dense.t())


@pytest.mark.parametrize("kind", KINDS)
def test_products_by_blocks_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a block of rows is decoded at once."""
    torch.manual_seed(5)
    width = WIDTH.get(kind, 40)
    matrix, decoded_rows = KINDS[kind](24, width), []
    layer = ColumnLinear("up", width, [Segment("up", 24, bias=True)], build=build_of(matrix.scheme))
    targets = layer.targets("up", ["up"])
    bias = torch.randn(24)
    targets.pop("up.bias")[0].fill("up.bias", bias)
    fill(targets, {"up": matrix})
    decode = PackedWeight.decoded

    def watched(self: PackedWeight, start: int, end: int, e: int = 0) -> Tensor:
        decoded_rows.append((start, end))
        return decode(self, start, end, e)

    monkeypatch.setattr("hybridrt.layers.quant.packed_weight.BLOCK", 10 * width)
    monkeypatch.setattr(PackedWeight, "decoded", watched)
    x = torch.randn(2, width)
    torch.testing.assert_close(layer(x, "relu2"), (x @ matrix.dense.t() + bias).relu().square())
    assert decoded_rows == [(0, 10), (10, 20), (20, 24)]


@pytest.mark.parametrize("tp", RANKS, ids=["one", "first", "second"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind: str, tp: TPGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate, up and down of each expert have scales of their own, and only the chosen experts are decoded."""
    torch.manual_seed(6)
    width = {"mxfp4": 96, "mxfp8": 96}.get(kind, 48)
    downs = {f"{e}.down_proj": KINDS[kind](width, 96 if kind.startswith("mx") else 48) for e in range(4)}
    inner = 96 if kind.startswith("mx") else 48
    made = {f"{e}.{name}_proj": KINDS[kind](inner, width) for e in range(4) for name in ("gate", "up")}
    layer = Experts("experts", 4, width, inner, activation="silu", build=build_of(next(iter(made.values())).scheme, tp))
    fill(layer.targets("x"), {f"x.{key}": matrix for key, matrix in (made | downs).items()})
    finish(layer)
    chosen: set[int] = set()
    decode = PackedWeight.decoded

    def watched(self: PackedWeight, start: int, end: int, e: int = 0) -> Tensor:
        chosen.add(e)
        return decode(self, start, end, e)

    monkeypatch.setattr(PackedWeight, "decoded", watched)
    x, weights = torch.randn(3, width), torch.rand(3, 2)
    ids = torch.tensor([[0, 3], [3, 0], [3, -1]], dtype=torch.int32)
    expected = torch.zeros(3, width)
    for t, row in enumerate(ids.tolist()):
        for weight, e in zip(weights[t], row):
            if e >= 0:
                gate, up = (tp.shard(made[f"{e}.{name}_proj"].dense, 0) for name in ("gate", "up"))
                hidden = torch.nn.functional.silu(x[t] @ gate.t()) * (x[t] @ up.t())
                expected[t] += weight * (hidden @ tp.shard(downs[f"{e}.down_proj"].dense, 1).t())
    torch.testing.assert_close(layer(x, weights, ids), expected, rtol=1e-5, atol=1e-6)
    assert chosen == {0, 3}


@pytest.mark.parametrize("tp", RANKS, ids=["one", "first", "second"])
@pytest.mark.parametrize("kind", ["fp8-blocks", "int4-zeros", "nvfp4"])
def test_a_shared_expert_that_is_stored_like_the_others(kind: str, tp: TPGroup) -> None:
    """It is one of the stack, with its multiplier."""
    torch.manual_seed(8)
    width = inner = 48
    keys = [f"{e}.{name}_proj" for e in ("x.0", "x.1", "s") for name in ("gate", "up", "down")]
    made = {key: KINDS[kind](48, 48) for key in keys}
    build = build_of(next(iter(made.values())).scheme, tp)
    layer = Experts("experts", 2, width, inner, activation="silu", shared_size=inner, scales=(1.0, 3.0), build=build)
    assert layer.shared is None and layer.num_shared == 1
    fill(layer.targets("x") | layer.shared_targets("s"), dict(made))
    finish(layer)
    x, weights, ids = torch.randn(2, width), torch.rand(2, 2), torch.tensor([[1, 2], [2, 0]], dtype=torch.int32)
    expected = torch.zeros(2, width)
    for t, row in enumerate(ids.tolist()):
        for weight, e in zip(weights[t], row):
            gate, up = (tp.shard(made[f"{('x.0', 'x.1', 's')[e]}.{name}_proj"].dense, 0) for name in ("gate", "up"))
            down = tp.shard(made[f"{('x.0', 'x.1', 's')[e]}.down_proj"].dense, 1) * (3.0 if e == 2 else 1.0)
            expected[t] += weight * ((torch.nn.functional.silu(x[t] @ gate.t()) * (x[t] @ up.t())) @ down.t())
    torch.testing.assert_close(layer(x, weights, ids), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plain", ["shared.gate_up.gate", "shared.gate_up.up", "shared.down.x", "0.gate"])
def test_a_shared_expert_that_is_stored_otherwise_is_apart(plain: str) -> None:
    build = build_of(KINDS["int4-zeros"](48, 48).scheme, plain=(plain,))
    layer = Experts("experts", 2, 48, 48, activation="silu", shared_size=48, build=build)
    assert layer.shared is not None and layer.num_shared == 0


@pytest.mark.parametrize(
    ("kind", "size", "shared_size"), [("int4-zeros", 48, 96), ("fp8-blocks", 42, 42), ("gptq-index", 48, 48)]
)
def test_a_shared_expert_whose_scales_may_lie_otherwise_is_apart(kind: str, size: int, shared_size: int) -> None:
    """It is larger; blocks of 4 rows have rows of gate and up, if these are one matrix; inputs may be in any order."""
    build = build_of(KINDS[kind](48, 48).scheme)
    layer = Experts("experts", 2, 48, size, activation="silu", shared_size=shared_size, build=build)
    assert layer.shared is not None and layer.num_shared == 0


def test_experts_with_scales_of_other_rows_are_refused() -> None:
    """The second one's gate and up are rows of one matrix, and a block has rows of both."""
    torch.manual_seed(9)
    made = {f"x.{e}.{name}_proj": KINDS["fp8-blocks"](42, 48) for e in (0, 1) for name in ("gate", "up")}
    made |= {f"x.{e}.down_proj": KINDS["fp8-blocks"](48, 42) for e in (0, 1)}
    layer = Experts("experts", 2, 48, 42, activation="silu", build=build_of(made["x.0.gate_proj"].scheme))
    targets, joined = layer.targets("x"), KINDS["fp8-blocks"](84, 48)
    with pytest.raises(CheckpointError, match="a module of its own"):
        for key, matrix in made.items():
            (piece,) = targets[f"{key}.weight"]
            whole = joined if key == "x.1.up_proj" else matrix
            part = (lambda t: t[..., 42:, :]) if whole is joined else (lambda t: t)
            for last, tensor in whole.tensors.items():
                piece.fill(whole.module(key), last, tensor, part)


@pytest.mark.parametrize("kind", ["fp8-rows", "int8-rows", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Codes are up to 448 or 127: their sums with large inputs would be infinite in float16."""
    torch.manual_seed(12)
    matrix = KINDS[kind](24, 1024)
    build = Build(TPGroup(), dtype, torch.device("cpu"), lambda part: matrix.scheme, quantised=True)
    layer = ColumnLinear("up", 1024, [Segment("up", 24)], build=build)
    fill(layer.targets("up", ["up"]), {"up": matrix})
    x = (40 * torch.randn(3, 1024)).to(dtype)
    found = layer(x)
    expected = x.float() @ matrix.dense.t()
    assert found.dtype == dtype
    assert float((found.float() - expected).norm() / expected.norm()) < 0.006


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_and_its_logits(kind: str) -> None:
    torch.manual_seed(7)
    width = WIDTH.get(kind, 40)
    matrix = KINDS[kind](32, width)
    embed = VocabParallelEmbedding("embed", 32, width, build=build_of(matrix.scheme))
    fill(embed.targets("embed"), {"embed": matrix})
    ids = torch.tensor([3, 31, 0, 3])
    torch.testing.assert_close(embed(ids), matrix.dense[ids])
    x = torch.randn(2, width)
    torch.testing.assert_close(embed.logits(x), x @ matrix.dense.t())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_layer_gets_the_decoded_matrix(kind: str) -> None:
    torch.manual_seed(8)
    matrix = KINDS[kind](24, WIDTH.get(kind, 40))
    torch.testing.assert_close(decoded(matrix.module("x"), matrix.tensors), matrix.dense)


@pytest.mark.parametrize(
    ("kind", "last", "change"),
    [
        ("int4-groups", "weight_shape", lambda t: -t),
        ("int4-groups", "weight_shape", lambda t: t[:0]),
        ("int4-groups", "weight_shape", lambda t: t * 2**40),
        ("int8-packed", "weight_shape", lambda t: t - torch.tensor([0, 4])),
        ("gptq", "qweight", lambda t: t[:0]),
        ("awq", "qweight", lambda t: t[:, :0]),
    ],
)
def test_broken_tensors_are_not_decoded(kind: str, last: str, change: object) -> None:
    """Nothing is allocated by what the file says."""
    matrix = edited(kind, last, change)
    with pytest.raises(CheckpointError, match=f"router.{last}"):
        decoded(matrix.module("router"), matrix.tensors)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_zero_point_of_a_whole_matrix(shape: tuple[int, ...]) -> None:
    torch.manual_seed(11)
    matrix = of_integers(Scheme("int8", "compressed", zeros=True))(24, 40)
    for last in ("weight_scale", "weight_zero_point"):
        matrix.tensors[last] = matrix.tensors[last].reshape(shape)
    torch.testing.assert_close(decoded(matrix.module("x"), matrix.tensors), matrix.dense)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_decoded_matrix_by_matrix(kind: str) -> None:
    torch.manual_seed(9)
    made = [KINDS[kind](24, WIDTH.get(kind, 40)) for _ in range(3)]
    tensors = {last: torch.stack([each.tensors[last] for each in made]) for last in made[0].tensors}
    dense = torch.stack([each.dense for each in made])
    torch.testing.assert_close(decoded(Written(made[0].scheme, tensors, dense).module("x"), tensors), dense)


def test_a_convolution_is_decoded_in_its_shape() -> None:
    torch.manual_seed(9)
    matrix = KINDS["fp8-tensor"](24, 4)
    matrix.tensors["weight"] = matrix.tensors["weight"].unsqueeze(1)
    found = decoded(matrix.module("conv1d"), matrix.tensors)
    torch.testing.assert_close(found, matrix.dense.unsqueeze(1))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_take_no_more_memory_than_in_the_file(kind: str) -> None:
    """256 x 1024: one scale for 128 numbers where the checkpoint has so."""
    scheme = KINDS[kind](8, 96).scheme
    weight = PackedWeight(scheme, (100, 156), 1024, build_of(scheme))
    stored = 256 * 1024 * (1 if scheme.method in ("fp8", "int8") else 0.5)
    grid = weight.scales.numel() * scheme.scale_dtype.itemsize + (weight.scales.numel() / 2 if scheme.zeros else 0)
    held = sum(param.nbytes for param in weight.parameters().values())
    assert held <= 1.1 * (stored + grid), (held, stored, grid)


def edited(kind: str, last: str, change: object) -> Written:
    torch.manual_seed(10)
    matrix = KINDS[kind](24, WIDTH.get(kind, 40))
    matrix.tensors[last] = change(matrix.tensors[last])  # type: ignore[operator]
    return matrix


def with_value(value: float, at: int = 0) -> object:
    def change(t: Tensor) -> Tensor:
        flat = t.float().flatten()
        flat[at] = value
        return flat.view(t.shape).to(t.dtype)

    return change


@pytest.mark.parametrize(
    ("kind", "last", "change", "text"),
    [
        ("fp8-blocks", "weight_scale_inv", with_value(torch.nan, 3), "up.weight_scale_inv contains NaN"),
        ("fp8-rows", "weight_scale", with_value(torch.inf), "up.weight_scale contains NaN or infinity"),
        ("fp8-rows", "weight_scale", with_value(-1.0), "up.weight_scale contains negative"),
        ("fp8-tensor", "weight_scale", with_value(0.0), "up.weight_scale is zero"),
        ("fp8-blocks", "weight_scale_inv", torch.zeros_like, "up.weight_scale_inv is zero"),
        ("int4-groups", "weight_scale", torch.zeros_like, "up.weight_scale is zero"),
        ("int4-groups", "weight_scale", with_value(-3e38), "up.weight_scale: numbers .* up to 4.5e.39"),
        ("nvfp4", "weight_scale_2", with_value(0.0), "up.weight_scale_2 is not positive"),
        ("nvfp4", "weight_scale_2", with_value(1e38), "up.weight_scale: numbers of this matrix would be up to"),
        ("nvfp4-ct", "weight_global_scale", with_value(1e-42), "up.weight_scale: numbers of this matrix would be"),
        ("mxfp4", "weight_scale", lambda t: t * 0 + 254, "up.weight_scale: numbers of this matrix would be up to"),
        ("fp8-rows", "weight_scale", lambda t: t.t().contiguous(), r"up.weight_scale has shape \[1, 24\]"),
        ("fp8-blocks", "weight_scale_inv", lambda t: torch.cat((t, t[:1])), "up.weight_scale_inv has shape"),
        ("fp8-blocks", "weight", with_value(torch.nan, 5), "up.weight contains NaN"),
        ("int4-groups", "weight_packed", lambda t: t[:, :-1], "up.weight_packed has shape"),
        ("int4-groups", "weight_shape", lambda t: t * 2, "up.weight_shape is"),
        ("int4-zeros", "weight_zero_point", lambda t: t[:-1], "up.weight_zero_point has shape"),
        ("gptq", "g_idx", with_value(99), "up.g_idx names groups from 0 to 99"),
        ("gptq", "g_idx", with_value(-1), "up.g_idx names groups from -1"),
        ("awq", "scales", lambda t: t.repeat(2, 1), "up.scales has shape"),
        ("nvfp4", "weight", lambda t: t.repeat(1, 2), "up.weight has shape"),
    ],
)
def test_broken_tensors(kind: str, last: str, change: object, text: str) -> None:
    matrix = edited(kind, last, change)
    layer = ColumnLinear("up", WIDTH.get(kind, 40), [Segment("up", 24)], build=build_of(matrix.scheme))
    with pytest.raises(CheckpointError, match=text):
        fill(layer.targets("up", ["up"]), {"up": matrix})


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("kind", "last"), [("fp8-rows", "input_scale"), ("nvfp4", "input_scale"), ("nvfp4-ct", "input_global_scale")]
)
def test_scales_of_activations_are_not_checked(kind: str, last: str, value: float) -> None:
    """Calibration leaves such values for experts that no token chose."""
    torch.manual_seed(10)
    matrix, width = KINDS[kind](24, WIDTH.get(kind, 40)), WIDTH.get(kind, 40)
    matrix.tensors[last] = torch.tensor(value)
    layer = ColumnLinear("up", width, [Segment("up", 24)], build=build_of(matrix.scheme))
    fill(layer.targets("up", ["up"]), {"up": matrix})
    x = torch.randn(3, width)
    torch.testing.assert_close(layer(x), x @ matrix.dense.t())


def test_groups_that_do_not_divide_the_inputs() -> None:
    """GPTQ's last group may be partial."""
    matrix = gptq(Scheme("int4", "gptq", (1, 16), scale_dtype=torch.float16, zeros=True, indexed=True))(24, 40)
    layer = ColumnLinear("up", 40, [Segment("up", 24)], build=build_of(matrix.scheme))
    fill(layer.targets("up", ["up"]), {"up": matrix})
    x = torch.randn(3, 40)
    torch.testing.assert_close(layer(x), x @ matrix.dense.t())
    matrix = KINDS["int4-groups"](24, 44)
    layer = ColumnLinear("up", 44, [Segment("up", 24)], build=build_of(matrix.scheme))
    with pytest.raises(CheckpointError, match="up has 44 inputs, which group_size 8 does not divide"):
        fill(layer.targets("up", ["up"]), {"up": matrix})


def test_a_matrix_of_another_size() -> None:
    matrix = KINDS["fp8-rows"](20, 40)
    layer = ColumnLinear("up", 40, [Segment("up", 24)], build=build_of(matrix.scheme))
    with pytest.raises(CheckpointError, match=r"up.*20 outputs"):
        fill(layer.targets("up", ["up"]), {"up": matrix})


def test_a_search_for_nan_makes_no_copy_of_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.layers.quant.pieces.BLOCK", 1 << 12)
    codes = torch.zeros(512, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scheme = Scheme("fp8", "fp8", (128, 128))
    with LiveBytes() as live:
        check_codes(scheme, "w", codes, 300)
    assert live.peak < codes.nbytes + 3 * (1 << 12)
    codes.view(torch.uint8)[511, 299] = 0xFF
    with pytest.raises(CheckpointError, match="w contains NaN"):
        check_codes(scheme, "w", codes, 300)
