import math

import pytest
import torch

from hybridrt.kernels.dense.norm_activation import clamped_silu_and_mul, relu2, sigmoid_mul, silu_and_mul

pytestmark = pytest.mark.usefixtures("provider")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerances(dtype):
    return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-6}


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 64])
def test_silu_and_mul_gate_first(dtype, width):
    torch.manual_seed(0)
    merged = (torch.randn(3, 4 * width) * 3).to(dtype)
    x = merged[:, width : 3 * width]
    before = merged.clone()
    out = silu_and_mul(x)
    assert out.dtype == dtype
    for row, got in zip(x.tolist(), out.double(), strict=True):
        expected = [gate * sigmoid(gate) * up for gate, up in zip(row[:width], row[width:], strict=True)]
        torch.testing.assert_close(got, torch.tensor(expected).double(), **tolerances(dtype))
    assert torch.equal(merged, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_silu_and_mul(dtype):
    """The gate's side from above alone, the other from both sides; each of them beyond its limit somewhere."""
    torch.manual_seed(0)
    x = (torch.randn(3, 34) * 3).to(dtype)
    limit = 1.25
    gate, up = x.double().chunk(2, -1)
    assert (gate.sigmoid() * gate).max() > limit and up.max() > limit and up.min() < -limit
    expected = (gate * gate.sigmoid()).clamp(max=limit) * up.clamp(-limit, limit)
    torch.testing.assert_close(clamped_silu_and_mul(x, limit).double(), expected, **tolerances(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu2(dtype):
    x = torch.tensor([-2.0, -0.0, 0.5, 3.0], dtype=dtype)
    assert torch.equal(relu2(x), torch.tensor([0.0, 0.0, 0.25, 9.0], dtype=dtype))
    assert torch.equal(x, torch.tensor([-2.0, -0.0, 0.5, 3.0], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_mul_element_wise_by_head_and_by_row(dtype):
    torch.manual_seed(0)
    x, gate = torch.randn(4, 6).to(dtype), torch.randn(4, 6).to(dtype)
    pairs = zip(x.flatten().tolist(), gate.flatten().tolist(), strict=True)
    expected = torch.tensor([value * sigmoid(g) for value, g in pairs]).double().view(4, 6)
    torch.testing.assert_close(sigmoid_mul(x, gate).double(), expected, **tolerances(dtype))
    by_row = torch.stack([x[i] * torch.sigmoid(gate[i, 0]) for i in range(4)])
    torch.testing.assert_close(sigmoid_mul(x, gate[:, :1]), by_row, **tolerances(dtype))
    wide = torch.randn(4, 9).to(dtype)
    heads = wide[:, 6:8]  # as a slice of a merged projection
    by_head = torch.stack([
        torch.cat([x[i, 3 * h : 3 * h + 3].double() * sigmoid(heads[i, h].item()) for h in range(2)]) for i in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(sigmoid_mul(x, heads).double(), by_head, **tolerances(dtype))
