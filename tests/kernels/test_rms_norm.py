import math

import pytest
import torch

from hybridrt.kernels.dense.norm_activation import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("provider")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def slow_rms_norm(x, weight, eps):
    out = torch.empty_like(x, dtype=torch.float64)
    for index in range(x.shape[0]):
        row = [float(value) for value in x[index]]
        scale = 1 / math.sqrt(sum(value * value for value in row) / len(row) + eps)
        out[index] = torch.tensor([value * scale * float(w) for value, w in zip(row, weight, strict=True)])
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(5, 1), (5, 63), (5, 128), (1, 63)])
def test_rms_norm(dtype, rows, width):
    torch.manual_seed(0)
    merged = (torch.randn(rows, 3 * width) * 0.01).to(dtype)
    x, weight = merged[:, width : 2 * width], torch.randn(width)
    before = merged.clone()
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), slow_rms_norm(x, weight, EPS), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(merged, before)


def test_any_number_of_leading_dims_and_no_rows():
    x, weight = torch.randn(2, 3, 4, 16), torch.randn(16)
    expected = rms_norm(x.view(-1, 16), weight, EPS).view_as(x)
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert rms_norm(torch.empty(0, 16), weight, EPS).shape == (0, 16)


@pytest.mark.parametrize("eps", [0.0, EPS])
@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_one_row_without_a_norm_is_as_one_of_two(value, eps):
    """Zeros with and without an epsilon, and numbers that are not finite."""
    x, weight = torch.ones(2, 8), torch.ones(8)
    x[:, 3:] = value
    x[:, :3] = 0.0 if value == 0 else 1.0
    torch.testing.assert_close(rms_norm(x[:1], weight, eps), rms_norm(x, weight, eps)[:1], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16])
def test_add_rms_norm_normalises_the_sum_as_stored(dtype, residual_dtype):
    torch.manual_seed(1)
    x, residual, weight = torch.randn(7, 33).to(dtype), torch.randn(7, 33).to(residual_dtype), torch.randn(33)
    total = (x.float() + residual.float()).to(residual_dtype)
    normed, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert normed.dtype == dtype and new_residual.dtype == residual_dtype
    assert torch.equal(new_residual, total) and new_residual.data_ptr() == residual.data_ptr()
    expected = slow_rms_norm(total.double(), weight, EPS)
    torch.testing.assert_close(normed.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
