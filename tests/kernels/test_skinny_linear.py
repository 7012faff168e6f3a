import itertools

import pytest
import torch
import torch.nn.functional as F

from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core import launch
from hybridrt.kernels.dense.skinny_linear import MAX_TOKENS, InputNorm, is_skinny, skinny_linear
from hybridrt.kernels.dense.skinny_linear_triton import Tile, matmul_tile
from hybridrt.layers.linear import MLP, DenseMethod
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, LinearMethod

pytestmark = pytest.mark.usefixtures("provider")
EPS = 1e-5


def by_formula(x, weight, bias=None, norm_weight=None, residual=None, activation=None):
    """Element by element in float64; x and residual are summed as stored, in residual's dtype."""
    total = None
    if residual is not None:
        total = (x.float() + residual.float()).to(residual.dtype)
    h = (x if total is None else total).double()
    if norm_weight is not None:
        h = h / torch.sqrt(h.square().mean(-1, keepdim=True) + EPS) * norm_weight.double()
    y = torch.stack([torch.stack([(row * w).sum() for w in weight.double()]) for row in h])
    if bias is not None:
        y += bias.double()
    if activation == "silu_and_mul":
        gate, up = y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :]
        y = gate / (1 + torch.exp(-gate)) * up
    elif activation == "relu2":
        y = y.clamp(min=0) ** 2
    return y, total


def case(tokens, out_features, in_features, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 2 * in_features, generator=generator).to(dtype)[:, in_features:]
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)
    return x, weight, generator


def check(got, expected, dtype):
    # Several tokens are normalised in x's dtype before the product, hence its epsilon and not float32's.
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps), error


# bfloat16 with several tokens is left to the GPU, and so is a bfloat16 residual: the interpreter has no bfloat16 dot
# and truncates when it stores.
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        (1, torch.float32),
        (1, torch.bfloat16),
        (1, torch.float16),
        (5, torch.float32),
        (16, torch.float16),
        (29, torch.float32),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu_and_mul", "relu2"])
@pytest.mark.parametrize("shape", [(8, 16), (42, 72)], ids=str)
def test_norm_bias_and_activation_around_the_product(tokens, dtype, activation, shape):
    x, weight, generator = case(tokens, *shape, dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    norm_weight = torch.randn(shape[1], generator=generator)
    residual = 10 * torch.randn(x.shape, generator=generator)
    residual = residual if dtype == torch.bfloat16 else residual.to(dtype)
    expected, total = by_formula(x, weight, bias, norm_weight, residual, activation)
    before = x.clone()
    y, new_residual = skinny_linear(x, weight, bias, norm=InputNorm(norm_weight, EPS, residual), activation=activation)
    assert y.dtype == dtype and y.shape == expected.shape
    check(y, expected, dtype)
    assert torch.equal(new_residual, total) and torch.equal(x, before)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("shape", [(5, 2048 + 24), (19, 1024), (1, 1)], ids=str)
def test_plain_products_of_many_columns_and_odd_rows(tokens, shape):
    x, weight, _ = case(tokens, *shape, torch.float32)
    y, residual = skinny_linear(x, weight)
    assert residual is None
    check(y, by_formula(x, weight)[0], torch.float32)


@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize(
    ("tokens", "tile"),
    [(1, (2, 32, 4)), (1, (16, 64, 4)), (3, (32, 32, 4, 3)), (20, (16, 32, 4, 2, 3)), (20, (16, 32, 4, 2, 3, 2))],
)
def test_any_tile_of_the_weight(tokens, tile, activation, monkeypatch):
    for name in ("matvec_tile", "matmul_tile"):
        monkeypatch.setattr(f"hybridrt.kernels.dense.skinny_linear_triton.{name}", lambda *_: Tile(*tile))
    x, weight, generator = case(tokens, 42, 104, torch.float32)
    norm_weight, residual = torch.randn(104, generator=generator), torch.randn(tokens, 104, generator=generator)
    expected, total = by_formula(x, weight, None, norm_weight, residual, activation)
    y, new_residual = skinny_linear(x, weight, norm=InputNorm(norm_weight, EPS, residual), activation=activation)
    check(y, expected, torch.float32)
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_product_goes_where_it_is_told(tokens):
    x, weight, _ = case(tokens, 24, 40, torch.float32)
    out = torch.full((tokens + 1, 24), torch.nan)
    got, _ = skinny_linear(x, weight, out=out[:tokens])
    assert got.data_ptr() == out.data_ptr() and bool(out[tokens:].isnan().all())
    check(out[:tokens], by_formula(x, weight)[0], torch.float32)


@pytest.mark.parametrize("tokens", [1, 3])
def test_norm_without_residual(tokens):
    x, weight, generator = case(tokens, 16, 1100, torch.float32)
    x *= 0.01  # so that eps counts
    norm_weight = torch.randn(1100, generator=generator)
    y, residual = skinny_linear(x, weight, norm=InputNorm(norm_weight, EPS))
    assert residual is None
    check(y, by_formula(x, weight, norm_weight=norm_weight)[0], torch.float32)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("first", "last"), [(16, 48), (1030, 33), (256, 384)])
def test_an_input_in_two_tensors(tokens, first, last):
    x, weight, generator = case(tokens, 12, first + last, torch.float32)
    merged = torch.randn(tokens, 2 * last, generator=generator)
    merged[:, last:] = x[:, first:]
    head = torch.full((tokens, first + 8), float("nan"))
    head[:, :first] = x[:, :first]
    y, _ = skinny_linear(head[:, :first], weight, tail=merged[:, last:])
    check(y, by_formula(x, weight)[0], torch.float32)


def test_parts_of_one_token_meet_parts_of_the_rows(monkeypatch):
    x, weight, _ = case(1, 48, 3 * 16, torch.float32)
    weight = weight[:, :16].contiguous()
    y, _ = skinny_linear(x, weight, parts=3)
    for i in range(3):
        rows = slice(16 * i, 16 * (i + 1))
        check(y[:, rows], by_formula(x[:, rows], weight[rows])[0], torch.float32)
    with pytest.raises(ConfigError, match="2 parts takes one token of 32 numbers and a multiple of 16 rows"):
        skinny_linear(x, weight, parts=2)
    method = DenseMethod(48, 16, Build(TPGroup(), torch.float32, torch.device("cpu")))
    method.weight.data = weight
    inputs = x.chunk(3, 1)
    founds = [method.apply_each(inputs), LinearMethod.apply_each(method, inputs)]
    monkeypatch.setattr("hybridrt.layers.linear.is_skinny", lambda *_: True)
    for found in (*founds, method.apply_each(inputs)):
        torch.testing.assert_close(torch.cat(list(found), 1), y)


def test_a_row_does_not_see_the_rows_beside_it():
    x, weight, _ = case(MAX_TOKENS, 24, 64, torch.float32)
    whole, _ = skinny_linear(x, weight)
    for tokens in (2, 7):
        part, _ = skinny_linear(x[:tokens], weight)
        torch.testing.assert_close(part, whole[:tokens], rtol=1e-6, atol=1e-6)
    poisoned = x.clone()
    poisoned[1:] = float("nan")
    assert torch.equal(skinny_linear(poisoned, weight)[0][0], whole[0])


def test_programs_that_share_rows_count_from_zero_again(monkeypatch):
    """Twice the same launch; in the second the counters are what the first left."""
    monkeypatch.setattr("hybridrt.kernels.dense.skinny_linear_triton.matmul_tile", lambda *_: Tile(16, 32, 4, 2, 4))
    x, weight, _ = case(3, 40, 300, torch.float32)
    first, again = skinny_linear(x, weight)[0], skinny_linear(x, weight)[0]
    check(first, by_formula(x, weight)[0], torch.float32)
    assert torch.equal(first, again)
    assert not any(counters.any() for kept in launch._counters.values() for counters in kept.values())


def test_counters_of_a_capture_were_zeros_before(monkeypatch):
    """No replay fills them, and no two owners share any."""
    monkeypatch.setattr(launch, "_reserved", {})
    monkeypatch.setattr(launch, "_RESERVE", 128)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first, second = torch.zeros(3), torch.zeros(3)
    launch.reserve_counters(first.device)
    reserve = launch._reserved[first.device]
    taken = [launch.arrival_counters(first, 40), launch.arrival_counters(second, 40)]
    assert [counters.data_ptr() - reserve.data_ptr() for counters in taken] == [0, 4 * 64]
    assert launch.arrival_counters(first, 40) is taken[0], "kept for the graphs that follow"
    launch.reserve_counters(first.device)
    assert (
        launch._reserved[first.device].data_ptr() != reserve.data_ptr() and len(launch._reserved[first.device]) == 128
    )
    assert all(len(counters) == 40 and not counters.any() for counters in taken)


def test_counters_made_within_a_capture_are_that_graphs_own(monkeypatch):
    """A replay fills them with zeros, and nothing else does: no other launch may use them."""
    monkeypatch.setattr(launch, "_reserved", {})
    weight = torch.zeros(3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = launch.arrival_counters(weight, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kept = launch.arrival_counters(weight, 4)
    assert kept is not captured and launch.arrival_counters(weight, 4) is kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch.arrival_counters(weight, 4) is kept, "made before the capture: no fill in each replay"
    assert launch.arrival_counters(weight, 5) is not kept


@pytest.mark.parametrize("tokens", [2, 16, 17, 32, 64])
def test_few_blocks_are_shared_and_few_that_are_left_over(tokens):
    device = 132  # multiprocessors
    for rows, columns in itertools.product((64, 1000, 64 * device, 8728, 18560, 24576), (256, 3072, 12288)):
        tile, blocks = matmul_tile(rows, columns, tokens), -(-rows // 64)
        shared = 0 if tile.split == 1 else blocks if tile.shared is None else tile.shared
        assert shared in (0, blocks, blocks % device) and shared * tile.split <= 2 * device
        assert tile.split <= -(-columns // tile.block_k), "each program has columns to multiply"
        assert tile.stages * (64 + max(16, tokens)) * tile.block_k * 2 <= 227 * 1024, "fits shared memory"
    assert matmul_tile(3072, 12288, 32).split == 5 and matmul_tile(18560, 4096, tokens).shared == (
        26 if tokens <= 32 else None
    )


def test_sum_keeps_the_residuals_dtype():
    x, weight, generator = case(1, 8, 32, torch.float16)
    residual, norm_weight = torch.randn(1, 32, generator=generator), torch.ones(32)
    expected = x.float() + residual
    y, total = skinny_linear(x, weight, norm=InputNorm(norm_weight, EPS, residual))
    assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    assert torch.equal(total, expected)


def test_too_many_tokens_and_a_tail_with_a_norm():
    x, weight, _ = case(MAX_TOKENS + 1, 8, 16, torch.float32)
    with pytest.raises(ConfigError, match=f"at most {MAX_TOKENS} tokens, not {MAX_TOKENS + 1}"):
        skinny_linear(x, weight)
    with pytest.raises(ConfigError, match="one tensor"):
        skinny_linear(x[:1, :8], weight, tail=x[:1, 8:], norm=InputNorm(torch.ones(16)))


def test_the_cpu_keeps_the_separate_operations():
    for tokens, dtype in itertools.product((1, 16), (torch.float32, torch.bfloat16)):
        assert not is_skinny(torch.zeros(tokens, 8, dtype=dtype), torch.zeros(8, 8, dtype=dtype), "relu2")


def test_the_reference_is_the_product_itself():
    x, weight, _ = case(3, 8, 16, torch.float32)
    torch.testing.assert_close(skinny_linear(x, weight)[0], F.linear(x, weight))


@pytest.mark.parametrize("activation", ["silu_and_mul", "relu2"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_compute_the_same_with_it_and_without(activation, tokens, monkeypatch):
    torch.manual_seed(0)
    device = torch.device("cpu")
    mlp = MLP("mlp", 32, 24, activation=activation, bias=True, build=Build(TPGroup(), torch.float16, device))
    norm = RMSNorm("norm", 32, EPS, device=device)
    for parameter in (*mlp.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    x, residual = torch.randn(2, tokens, 32).half()
    for before in (None, residual):
        separate = mlp(norm, x, None if before is None else before.clone(), None)
        with monkeypatch.context() as patch:
            patch.setattr("hybridrt.layers.linear.is_skinny", lambda *_: True)
            fused = mlp(norm, x, None if before is None else before.clone(), None)
        torch.testing.assert_close(fused, separate, rtol=1e-2, atol=1e-2)
        assert torch.equal(fused[1], x if before is None else x + before)


def test_weights_of_another_dtype_are_refused() -> None:
    x, weight, _ = case(1, 24, 40, torch.float32)
    with pytest.raises(ConfigError, match=r"takes x and W of one dtype, not torch\.bfloat16 and torch\.float32"):
        skinny_linear(x.bfloat16(), weight)
