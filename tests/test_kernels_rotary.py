import math

import pytest
import torch

from hybridrt.kernels.rms_norm import rms_norm
from hybridrt.kernels.rotary import apply_rotary, qk_norm_rotary


def table(max_positions, rot, theta=100.0):
    angles = torch.arange(max_positions).unsqueeze(1) * theta ** (-torch.arange(0, rot, 2) / rot)
    return torch.cat((angles.cos(), angles.sin()), 1)


def slow_rotary(x, positions, rot, theta=100.0):
    out = x.double().clone()
    for t, position in enumerate(positions.tolist()):
        for i in range(rot // 2):
            angle = position * theta ** (-2 * i / rot)
            a, b = x[t, :, i].double(), x[t, :, i + rot // 2].double()
            out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, :, i + rot // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rot", [4, 16])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_rotates_the_first_dims_of_views_of_a_merged_projection(dtype, rot, position_dtype):
    torch.manual_seed(0)
    merged = torch.randn(5, (3 + 2 + 2) * 16).to(dtype)
    q, k = merged[:, : 3 * 16].view(5, 3, 16), merged[:, 3 * 16 : 5 * 16].view(5, 2, 16)
    positions = torch.tensor([0, 7, 3, 3, 11], dtype=position_dtype)
    expected = slow_rotary(q, positions, rot), slow_rotary(k, positions, rot)
    out = apply_rotary(q, k, positions, table(12, rot))
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for got, want in zip(out, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)


def test_norm_per_head_comes_first():
    torch.manual_seed(0)
    q, k, positions = torch.randn(4, 3, 8), torch.randn(4, 1, 8), torch.tensor([5, 0, 2, 9])
    q_weight, k_weight = torch.randn(8), torch.randn(8)
    got = qk_norm_rotary(q.clone(), k.clone(), positions, table(10, 8), q_weight, k_weight, 1e-6)
    want = apply_rotary(rms_norm(q, q_weight, 1e-6), rms_norm(k, k_weight, 1e-6), positions, table(10, 8))
    torch.testing.assert_close(got, want)


def test_no_tokens():
    q, k = apply_rotary(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int64), table(4, 8))
    assert q.shape == (0, 2, 8) and k.shape == (0, 1, 8)
