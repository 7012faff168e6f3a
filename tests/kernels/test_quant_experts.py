"""Routed experts with weights of 8 and 4 bits against float64, pair by pair."""

import pytest
import torch

from hybridrt.kernels.quant.quant_experts import QuantStack, quant_experts
from hybridrt.kernels.quant.quant_weight import dequantize, expert_of
from tests.support.quant_weights import FORMATS, quant_weight

pytestmark = pytest.mark.usefixtures("provider")


def by_pairs(x, experts, weights, ids):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
            if e < 0:
                continue
            up, down = (dequantize(expert_of(w, e)).double() for w in (experts.up, experts.down))
            hidden = up @ x[t].double() + (0 if experts.b_up is None else experts.b_up[e].double())
            if experts.activation == "silu":
                gate, linear = hidden.chunk(2)
                hidden = gate / (1 + torch.exp(-gate)) * linear
            else:
                hidden = hidden.clamp(min=0) ** 2
            out[t] += weight * (down @ hidden + (0 if experts.b_down is None else experts.b_down[e].double()))
    return out


def case(name, tokens, activation="silu", count=5, width=96, inner=40, biased=False, top_k=2):
    rows = 2 * inner if activation == "silu" else inner
    up, down = quant_weight(name, rows, width, count), quant_weight(name, width, inner, count, seed=1)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 2 * width, generator=generator)[:, width:]
    biases = (torch.randn(count, rows, generator=generator), torch.randn(count, width, generator=generator))
    experts = QuantStack(up, down, activation, None, None, *(biases if biased else ()))
    ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]).int()
    return x, experts, torch.rand(tokens, top_k, generator=generator), ids


def check(x, experts, weights, ids):
    got, wanted = quant_experts(x, experts, weights, ids), by_pairs(x, experts, weights, ids)
    assert got.dtype == x.dtype and got.shape == x.shape
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < 1e-5, error


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_experts_of_each_format(name, activation):
    check(*case(name, 6, activation))


@pytest.mark.parametrize("name", ["fp8 blocks", "int4 zeros", "nvfp4"])
def test_biases_and_pairs_without_an_expert(name):
    x, experts, weights, ids = case(name, 5, biased=True)
    ids[1, 0], ids[3] = -1, -1
    check(x, experts, weights, ids)
    assert not quant_experts(x, experts, weights, ids)[3].any()


@pytest.mark.parametrize("name", ["fp8 blocks", "int4"])
def test_many_tokens_of_few_experts_in_larger_blocks(name):
    check(*case(name, 40, count=2, width=160, inner=32, top_k=2))


@pytest.mark.parametrize("name", ["fp8 rows", "mxfp4"])
def test_blocks_that_begin_within_a_tile_and_widths_past_it(name):
    check(*case(name, 3, width=264, inner=136))


@pytest.mark.parametrize("name", ["fp8 blocks", "nvfp4"])
def test_experts_that_no_token_chose_are_not_read(name):
    x, experts, weights, ids = case(name, 4)
    ids = ids % 4
    ids[:, 1] = (ids[:, 0] + 1) % 4
    whole = quant_experts(x, experts, weights, ids)
    for w in (experts.up, experts.down):
        w.scale[4] = torch.nan
    assert torch.equal(quant_experts(x, experts, weights, ids), whole)
