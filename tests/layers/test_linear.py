"""How a block ends: inputs side by side without a copy, and products that end with the residual."""

import numpy as np
import pytest
import torch

from hybridrt.base.quantization import Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.linear import DenseMethod, RowLinear, Segment, VocabParallelEmbedding, side_by_side
from hybridrt.layers.weights import Build


def make(bias: bool = False, tp: TPGroup | None = None) -> RowLinear:
    build = Build(tp or TPGroup(), torch.float32, torch.device("cpu"))
    linear = RowLinear("out", [Segment("attn", 4, bias=bias), Segment("ssm", 6)], 5, build=build)
    linear.weight.data.copy_(torch.randn(5, linear.weight.shape[1]))
    if linear.bias is not None:
        linear.bias.data.copy_(torch.randn(5))
    return linear


@pytest.mark.parametrize("rows", [3, 1])
def test_neighbouring_columns_are_joined_without_a_copy(rows: int) -> None:
    attn, ssm = torch.empty(rows, 10).split([4, 6], dim=-1)
    # Reshaped, a single row says of its stride what it likes.
    joined = side_by_side(attn.fill_(1).reshape(rows, -1), ssm.fill_(2).reshape(rows, -1))
    assert joined.stride() == (10, 1)
    assert joined.data_ptr() == attn.data_ptr() and joined[:, :4].eq(1).all() and joined[:, 4:].eq(2).all()


def test_other_columns_are_copied() -> None:
    whole, other = torch.randn(3, 10), torch.randn(3, 10)
    apart = [
        (whole[:, :4], whole[:, 5:]), (whole[:, 4:], whole[:, :4]), (whole[:, :4], other[:, 4:]),
        (whole.t()[:, :1], whole.t()[:, 1:]), (whole[:, :4], whole[:, 4:].contiguous()),
        (whole[:, :4], whole.flatten()[4:22].view(3, 6)), tuple(map(torch.from_numpy, np.split(whole.numpy(), [4], 1))),
    ]  # fmt: skip
    for x, tail in apart:
        joined = side_by_side(x, tail)
        assert torch.equal(joined, torch.cat((x, tail), 1)) and joined.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adds_from", [3, 4])
def test_a_product_ends_with_the_residual(
    bias: bool, dtype: torch.dtype, adds_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with a bias, nor onto a residual of another dtype, nor of few tokens: the next norm adds it then."""
    torch.manual_seed(0)
    monkeypatch.setattr(DenseMethod, "adds_from", adds_from)
    linear, residual, (attn, ssm) = make(bias), torch.randn(3, 5, dtype=dtype), (torch.randn(3, 4), torch.randn(3, 6))
    want = linear(attn, ssm) + residual
    added, rest = linear.onto(residual, attn, ssm)
    assert (rest is None) == (not bias and dtype == torch.float32 and adds_from == 3)
    torch.testing.assert_close(added if rest is None else added + rest, want)


def test_one_rank_alone_adds_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summands of two ranks hold it once."""
    torch.manual_seed(0)
    monkeypatch.setattr(DenseMethod, "adds_from", 1)
    residual, x, parts = torch.randn(3, 5), torch.randn(3, 10), []
    linears = [make(tp=TPGroup(rank, 2)) for rank in range(2)]
    monkeypatch.setattr(TPGroup, "all_reduce", lambda group, y: parts.append(y) or y)
    for linear, shard in zip(linears, x.split(5, 1), strict=True):
        assert linear.onto(residual.clone(), shard)[1] is None
    weight = torch.cat([linear.weight for linear in linears], 1)
    torch.testing.assert_close(parts[0] + parts[1], x @ weight.t() + residual)


NARROW = Build(TPGroup(), torch.float32, torch.device("cpu"), lambda part: Scheme(dtype=torch.bfloat16))


def test_a_narrow_table_gives_rows_and_logits_of_the_model_s_dtype() -> None:
    torch.manual_seed(0)
    table = VocabParallelEmbedding("embed", 50, 8, build=NARROW)
    table.weight.data.copy_(torch.randn(50, 8))
    wide, ids, x = table.weight.float(), torch.tensor([3, 0, 49]), torch.randn(4, 8)
    assert table.weight.dtype == torch.bfloat16
    assert table(ids).dtype == torch.float32 and torch.equal(table(ids), wide[ids])
    out = torch.empty(4, 50)
    table.logits_into(out, x)
    for logits in (out, table.logits(x)):
        torch.testing.assert_close(logits, x @ wide.t())


@pytest.mark.parametrize("adds_from", [1, 9])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_narrow_weight_has_all_products(tokens: int, adds_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(DenseMethod, "adds_from", adds_from)
    linear = RowLinear("out", [Segment("attn", 4), Segment("ssm", 6)], 6, build=NARROW)
    linear.weight.data.copy_(torch.randn(6, 10))
    wide, attn, ssm = linear.weight.float(), torch.randn(tokens, 4), torch.randn(tokens, 6)
    want, residual = torch.cat((attn, ssm), 1) @ wide.t(), torch.randn(tokens, 6)
    torch.testing.assert_close(linear(attn, ssm), want)
    added, rest = linear.onto(residual.clone(), attn, ssm)
    torch.testing.assert_close(added if rest is None else added + rest, want + residual)
    inputs = torch.randn(2, tokens, 10)
    found = torch.cat([*linear.method.apply_each(list(inputs))], 1)
    torch.testing.assert_close(found, torch.cat([inputs[0] @ wide[:3].t(), inputs[1] @ wide[3:].t()], 1))
