import pytest
import torch

from hybridrt.kernels.moe import fused_experts, router_sigmoid_grouped, router_softmax

pytestmark = pytest.mark.usefixtures("provider")
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_softmax(renormalize):
    torch.manual_seed(0)
    logits = torch.randn(5, 7)
    weights, ids = router_softmax(logits, 3, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for t in range(5):
        probabilities = [float(logits[t, e].exp() / logits[t].exp().sum()) for e in range(7)]
        best = sorted(range(7), key=lambda e: -probabilities[e])[:3]
        total = sum(probabilities[e] for e in best) if renormalize else 1.0
        assert ids[t].tolist() == best
        torch.testing.assert_close(weights[t], torch.tensor([probabilities[e] / total for e in best]))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2)])
def test_router_sigmoid_grouped(renormalize, n_group, topk_group):
    torch.manual_seed(0)
    logits, bias = torch.randn(40, 12), torch.randn(12) * 0.3
    weights, ids = router_sigmoid_grouped(logits, bias, 3, n_group, topk_group, renormalize, 2.5)
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


def slow_experts(x, w_up, w_down, weights, ids, activation, gated):
    act = {"silu": torch.nn.functional.silu, "relu2": lambda h: h.clamp(min=0) ** 2}[activation]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if expert >= 0:
                hidden = w_up[expert].double() @ x[t].double()
                inner = w_down.shape[2]
                hidden = act(hidden[:inner]) * hidden[inner:] if gated else act(hidden)
                out[t] += weight * (w_down[expert].double() @ hidden)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("relu2", False), ("silu", False), ("relu2", True)])
def test_experts_with_padding_and_experts_that_nobody_chose(dtype, tokens, activation, gated):
    torch.manual_seed(0)
    experts, width, inner = 6, 10, 5
    x = torch.randn(tokens, 2 * width).to(dtype)[:, width:]
    w_up = (torch.randn(experts, (1 + gated) * inner, width) * 0.3).to(dtype)
    w_down = (torch.randn(experts, width, inner) * 0.3).to(dtype)
    weights, ids = router_softmax(torch.randn(tokens, experts - 2), 3, True)
    ids[tokens // 2, 1:] = -1
    out = fused_experts(x, w_up, w_down, weights, ids, activation=activation, gated=gated)
    expected = slow_experts(x, w_up, w_down, weights, ids, activation, gated)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    ids[tokens // 2] = -1
    out = fused_experts(x, w_up, w_down, weights, ids, activation=activation, gated=gated)
    assert torch.equal(out[tokens // 2], torch.zeros(width, dtype=dtype))


def test_a_token_s_result_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    x, w_up, w_down = torch.randn(8, 16), torch.randn(4, 24, 16) * 0.3, torch.randn(4, 16, 12) * 0.3
    weights, ids = router_softmax(torch.randn(8, 4), 2, True)
    together = fused_experts(x, w_up, w_down, weights, ids, activation="silu", gated=True)
    for t in range(8):
        row = slice(t, t + 1)
        alone = fused_experts(x[row], w_up, w_down, weights[row], ids[row], activation="silu", gated=True)
        torch.testing.assert_close(alone, together[row])


def test_no_tokens():
    out = fused_experts(
        torch.empty(0, 4),
        torch.randn(2, 6, 4),
        torch.randn(2, 4, 3),
        torch.empty(0, 2),
        torch.empty(0, 2, dtype=torch.int32),
        activation="silu",
        gated=True,
    )
    assert out.shape == (0, 4)
