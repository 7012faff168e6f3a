import pytest
import torch

from hybridrt.kernels.dense.moe import (
    ExpertShare,
    ExpertStack,
    GroupedChoice,
    SoftmaxChoice,
    fused_experts,
    router_product,
    router_sigmoid_grouped,
    router_softmax,
)
from tests.support.levels import sweep

pytestmark = pytest.mark.usefixtures("provider")
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 5, 5000), (2, 40, 700), (33, 5, 40), (0, 5, 40)])
def test_product_of_a_router(tokens, experts, width):
    """Twice: with parts of the columns in programs of their own, the second launch counts them from zero again."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 2 * width).half()[:, width:], torch.randn(experts, width)
    logits, again = router_product(x, weight), router_product(x, weight)
    assert logits.dtype == torch.float32 and torch.equal(logits, again)
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_softmax(renormalize):
    torch.manual_seed(0)
    logits = torch.randn(5, 7)
    weights, ids = router_softmax(logits, SoftmaxChoice(3, renormalize))
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for t in range(5):
        probabilities = [float(logits[t, e].exp() / logits[t].exp().sum()) for e in range(7)]
        best = sorted(range(7), key=lambda e: -probabilities[e])[:3]
        total = sum(probabilities[e] for e in best) if renormalize else 1.0
        assert ids[t].tolist() == best
        torch.testing.assert_close(weights[t], torch.tensor([probabilities[e] / total for e in best]))


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts_follow_the_chosen_ones(shared):
    torch.manual_seed(0)
    merged = torch.randn(5, 16)
    weights, ids = router_softmax(merged[:, :7], SoftmaxChoice(3, True, shared), merged[:, 7])
    routed = router_softmax(merged[:, :7], SoftmaxChoice(3, True))
    assert torch.equal(weights[:, :3], routed[0]) and torch.equal(ids[:, :3], routed[1])
    torch.testing.assert_close(weights[:, 3:], torch.sigmoid(merged[:, 7:8]).expand(-1, shared))
    assert ids[:, 3:].tolist() == [list(range(7, 7 + shared))] * 5 and ids.dtype == torch.int32


def test_of_equal_scores_the_first_are_chosen(provider):
    if provider == "torch":
        pytest.skip("torch.topk names no order")
    weights, ids = router_softmax(torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0]]).half(), SoftmaxChoice(3, False))
    assert ids.tolist() == [[1, 3, 0]] and weights[0, 0] == weights[0, 1] > weights[0, 2] > 0


def test_shared_experts_behind_sigmoid_scores_weigh_one():
    torch.manual_seed(0)
    logits, bias = torch.randn(5, 12), torch.randn(12)
    weights, ids = router_sigmoid_grouped(logits, bias, GroupedChoice(3, 4, 2, True, 2.5, 2))
    routed = router_sigmoid_grouped(logits, bias, GroupedChoice(3, 4, 2, True, 2.5))
    assert torch.equal(weights[:, :3], routed[0]) and torch.equal(ids[:, :3], routed[1])
    assert weights[:, 3:].tolist() == [[1.0, 1.0]] * 5 and ids[:, 3:].tolist() == [[12, 13]] * 5


def test_logits_that_are_no_numbers_choose_experts_that_exist():
    for logits in (torch.full((1, 12), float("nan")), -torch.full((1, 12), float("nan")), torch.full((1, 12), 1e38)):
        for n_group in (1, 4):
            _, ids = router_sigmoid_grouped(
                logits, torch.zeros(12), GroupedChoice(3, n_group, n_group // 2 + 1, True, 2.5)
            )
            assert ((ids >= 0) & (ids < 12)).all() and len(ids.unique()) == 3
        _, ids = router_softmax(logits, SoftmaxChoice(3, True))
        assert ((ids >= 0) & (ids < 12)).all() and len(ids.unique()) == 3


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2)])
def test_router_sigmoid_grouped(renormalize, n_group, topk_group):
    torch.manual_seed(0)
    logits, bias = torch.randn(40, 12), torch.randn(12) * 0.3
    weights, ids = router_sigmoid_grouped(logits, bias, GroupedChoice(3, n_group, topk_group, renormalize, 2.5))
    size = 12 // n_group
    for t in range(40):
        scores = [float(torch.sigmoid(logits[t, e])) for e in range(12)]
        biased = [score + float(b) for score, b in zip(scores, bias, strict=True)]
        strength = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        groups = sorted(range(n_group), key=lambda g: -strength[g])[:topk_group]
        best = sorted((e for g in groups for e in range(g * size, (g + 1) * size)), key=lambda e: -biased[e])[:3]
        total = sum(scores[e] for e in best) if renormalize else 1.0
        assert ids[t].tolist() == best
        torch.testing.assert_close(weights[t], torch.tensor([2.5 * scores[e] / total for e in best]))


@pytest.mark.parametrize("tokens_per_row", [1, 3])
def test_padding_rows_go_to_no_expert(tokens_per_row):
    torch.manual_seed(0)
    rows = torch.tensor([7, 0, 2, 0], dtype=torch.int32)
    padding = (rows == 0).repeat_interleave(tokens_per_row)
    logits, bias, gate = torch.randn(4 * tokens_per_row, 12), torch.randn(12), torch.randn(4 * tokens_per_row)
    for route in (
        lambda rows: router_softmax(logits, SoftmaxChoice(3, True, 1), gate, rows),
        lambda rows: router_sigmoid_grouped(logits, bias, GroupedChoice(3, 4, 2, True, 2.5), rows),
    ):
        (weights, ids), plain = route(rows), route(None)
        assert (ids[padding] == -1).all() and (weights[padding] == 0).all()
        assert torch.equal(ids[~padding], plain[1][~padding]) and torch.equal(weights[~padding], plain[0][~padding])


def test_experts_of_other_ranks_are_none_and_all_are_counted():
    torch.manual_seed(0)
    rows = torch.tensor([7, 0, 2], dtype=torch.int32)
    logits, bias = torch.randn(3, 12), torch.randn(12)
    for route in (
        lambda share: router_softmax(logits, SoftmaxChoice(3, True), None, rows, share),
        lambda share: router_sigmoid_grouped(logits, bias, GroupedChoice(3, 4, 2, True, 2.5), rows, share),
    ):
        (weights, ids), load = route(None), torch.arange(12)
        for first in (0, 4, 8):
            own_weights, own = route(ExpertShare(first, 4, load))
            assert torch.equal(own, torch.where((ids >= first) & (ids < first + 4), ids - first, -1))
            assert torch.equal(own_weights, weights)
        counted = torch.bincount(ids[rows > 0].flatten(), minlength=12)
        assert torch.equal(load, torch.arange(12) + 3 * counted)


@pytest.mark.parametrize("experts", [40, 10])
def test_experts_of_padding_are_not_read(provider, experts):
    """Gathered by pair, or grouped by expert: what padding alone would have chosen may be NaN, and real rows get the
    same bits with padding among them as with rows that go somewhere."""
    torch.manual_seed(0)
    x, weights = torch.randn(6, 16), torch.rand(6, 3)
    ids = torch.stack([torch.randperm(experts - 3)[:3] for _ in range(6)]).int()
    ids[4:] = torch.arange(experts - 3, experts, dtype=torch.int32)
    w_up, w_down = torch.randn(experts, 24, 16) * 0.3, torch.randn(experts, 16, 12) * 0.3
    everywhere = fused_experts(x, ExpertStack(w_up, w_down, "silu"), weights, ids)
    w_up[experts - 3 :] = w_down[experts - 3 :] = float("nan")
    ids[4:] = -1
    out = fused_experts(x, ExpertStack(w_up, w_down, "silu"), weights, ids)
    assert torch.equal(out[:4], everywhere[:4]) and (out[4:] == 0).all()


def slow_experts(x, w_up, w_down, weights, ids, activation):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if expert >= 0:
                hidden = w_up[expert].double() @ x[t].double()
                if activation == "silu":
                    gate, up = hidden.chunk(2)
                    hidden = torch.nn.functional.silu(gate) * up
                else:
                    hidden = hidden.clamp(min=0) ** 2
                out[t] += weight * (w_down[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", sweep([1, 9, 40], 2))
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_experts_with_padding_and_experts_without_tokens(dtype, tokens, activation):
    torch.manual_seed(0)
    experts, width, inner = 6, 10, 5
    x = torch.randn(tokens, 2 * width).to(dtype)[:, width:]
    w_up = (torch.randn(experts, inner * (2 if activation == "silu" else 1), width) * 0.3).to(dtype)
    w_down = (torch.randn(experts, width, inner) * 0.3).to(dtype)
    weights, ids = router_softmax(torch.randn(tokens, experts - 2), SoftmaxChoice(3, True))
    ids[tokens // 2, 1:] = -1
    out = fused_experts(x, ExpertStack(w_up, w_down, activation), weights, ids)
    expected = slow_experts(x, w_up, w_down, weights, ids, activation)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    ids[tokens // 2] = -1
    out = fused_experts(x, ExpertStack(w_up, w_down, activation), weights, ids)
    assert torch.equal(out[tokens // 2], torch.zeros(width, dtype=dtype))


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_with_a_limit(tokens):
    """Few tokens and several of one expert: both factors of SwiGLU are clamped, and both differ from those that are
    not."""
    torch.manual_seed(0)
    x, w_up, w_down = torch.randn(tokens, 16), torch.randn(6, 24, 16), torch.randn(6, 16, 12)
    weights, ids = router_softmax(torch.randn(tokens, 6), SoftmaxChoice(2, True))
    out = fused_experts(x, ExpertStack(w_up, w_down, "silu", 0.5), weights, ids)
    expected = torch.zeros(tokens, 16)
    for t in range(tokens):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (w_up[expert] @ x[t]).chunk(2)
            hidden = torch.nn.functional.silu(gate).clamp(max=0.5) * up.clamp(-0.5, 0.5)
            expected[t] += weight * (w_down[expert] @ hidden)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_with_biases_and_clamped_inputs(tokens, dtype):
    """As in gpt-oss: few tokens and several of one expert; most inputs of SwiGLU are clamped."""
    torch.manual_seed(0)
    x, w_up, w_down = torch.randn(tokens, 16).to(dtype), torch.randn(6, 24, 16).to(dtype), torch.randn(6, 16, 12)
    b_up, b_down = torch.randn(6, 24).to(dtype), torch.randn(6, 16).to(dtype)
    weights, ids = router_softmax(torch.randn(tokens, 6), SoftmaxChoice(2, True))
    ids[-1, 1] = -1
    experts = ExpertStack(w_up, w_down.to(dtype), "silu", 0.5, 1.7, b_up, b_down)
    expected = torch.zeros(tokens, 16, dtype=torch.float64)
    for t in range(tokens):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            if expert >= 0:
                gate, up = (w_up[expert].double() @ x[t].double() + b_up[expert].double()).chunk(2)
                gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
                hidden = gate * torch.sigmoid(1.7 * gate) * (up + 1)
                expected[t] += weight * (experts.w_down[expert].double() @ hidden + b_down[expert].double())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    found = fused_experts(x, experts, weights, ids).double()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [1, 9])
def test_biases_of_experts_without_a_gate(tokens):
    torch.manual_seed(0)
    x, w_up, w_down = torch.randn(tokens, 16), torch.randn(6, 12, 16), torch.randn(6, 16, 12)
    b_up, b_down = torch.randn(6, 12), torch.randn(6, 16)
    weights, ids = router_softmax(torch.randn(tokens, 6), SoftmaxChoice(2, True))
    out = fused_experts(x, ExpertStack(w_up, w_down, "relu2", None, None, b_up, b_down), weights, ids)
    hidden = (torch.einsum("eid,td->tei", w_up, x) + b_up).relu().square()
    each = torch.einsum("edi,tei->ted", w_down, hidden) + b_down
    wanted = (each.gather(1, ids.long().unsqueeze(2).expand(-1, -1, 16)) * weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-4)


def test_a_token_s_result_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    x, w_up, w_down = torch.randn(8, 16), torch.randn(4, 24, 16) * 0.3, torch.randn(4, 16, 12) * 0.3
    weights, ids = router_softmax(torch.randn(8, 4), SoftmaxChoice(2, True))
    together = fused_experts(x, ExpertStack(w_up, w_down, "silu"), weights, ids)
    for t in range(8):
        row = slice(t, t + 1)
        alone = fused_experts(x[row], ExpertStack(w_up, w_down, "silu"), weights[row], ids[row])
        torch.testing.assert_close(alone, together[row])


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize(("tokens", "experts"), [(40, 6), (9, 40), (70, 2), (300, 5)])
def test_pairs_are_laid_out_by_expert_in_blocks(provider, monkeypatch, compared, tokens, experts):
    """By comparing all with all, or by a sort: block after block of one expert, in the order of the pairs."""
    if provider == "torch":
        pytest.skip("one path")
    from hybridrt.kernels.dense import moe_triton

    monkeypatch.setattr(moe_triton, "COMPARED_PAIRS", tokens * 3 if compared else 0)
    torch.manual_seed(tokens)
    ids = torch.randint(0, experts - 1, (tokens, 3), dtype=torch.int32)  # no token has the last
    ids[torch.rand(tokens, 3) < 0.1] = -1
    blocks = moe_triton.lay_out(ids, experts)
    wanted = []
    for expert in range(experts):
        own = [p for p, e in enumerate(ids.flatten().tolist()) if e == expert]
        for first in range(0, len(own), blocks.size):
            held = own[first : first + blocks.size]
            wanted.append((expert, held + [tokens * 3] * (blocks.size - len(held))))
    found = blocks.experts.tolist()
    assert found == [expert for expert, _ in wanted] + [experts] * (len(found) - len(wanted))
    for i, (_, held) in enumerate(wanted):
        assert blocks.pairs[i * blocks.size : (i + 1) * blocks.size].tolist() == held


def test_no_tokens():
    experts = ExpertStack(torch.randn(2, 6, 4), torch.randn(2, 4, 3), "silu")
    out = fused_experts(torch.empty(0, 4), experts, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    assert out.shape == (0, 4)
