import math

import pytest
import torch

from hybridrt.kernels.attention.paged_attention import qk_norm_rotary, rotary_write_kv
from hybridrt.kernels.core.records import KVPlaces, Rope
from hybridrt.kernels.dense.norm_activation import rms_norm

pytestmark = pytest.mark.usefixtures("provider")


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
    other = merged[:, 5 * 16 :].clone()
    out = qk_norm_rotary(q, k, positions, Rope(table(12, rot)))
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for got, want in zip(out, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)
    assert torch.equal(merged[:, 5 * 16 :], other)


@pytest.mark.parametrize("sections", [(3, 3, 2), (5, 2, 1), (0, 0, 0)])
def test_three_axes_take_turns(sections):
    """By a loop over pairs, each turned by its axis alone; equal axes are one."""
    torch.manual_seed(0)
    q, k, rot = torch.randn(5, 3, 20), torch.randn(5, 2, 20), 16
    places = torch.tensor([[0, 7, 3, 3, 11], [1, 2, 3, 4, 5], [9, 9, 0, 6, 2]], dtype=torch.int32)
    buffer = torch.full((4, 9), 99, dtype=torch.int32)
    positions = buffer[:3, :5]  # views of wider buffers are fine
    positions.copy_(places)
    by_axis = [[slow_rotary(x, axis, rot) for axis in places] for x in (q, k)]
    want = [turned[0].clone() for turned in by_axis]
    for i in range(rot // 2):
        axis = i % 3 if i < 3 * sections[i % 3] else 0
        for out, turned in zip(want, by_axis, strict=True):
            out[:, :, [i, i + rot // 2]] = turned[axis][:, :, [i, i + rot // 2]]
    rope = Rope(table(12, rot), sections=sections)
    got = qk_norm_rotary(q.clone(), k.clone(), positions, rope)
    torch.testing.assert_close([x.double() for x in got], want, rtol=1e-6, atol=1e-6)
    equal = qk_norm_rotary(q.clone(), k.clone(), places[:1].expand(3, -1).contiguous(), rope)
    torch.testing.assert_close(equal, qk_norm_rotary(q.clone(), k.clone(), places[0], rope))


def test_norm_per_head_comes_first():
    torch.manual_seed(0)
    q, k, positions = torch.randn(4, 3, 8), torch.randn(4, 1, 8), torch.tensor([5, 0, 2, 9])
    q_weight, k_weight = torch.randn(8), torch.randn(8)
    got = qk_norm_rotary(q.clone(), k.clone(), positions, Rope(table(10, 8), q_weight, k_weight, 1e-6))
    normed = rms_norm(q, q_weight, 1e-6), rms_norm(k, k_weight, 1e-6)
    want = qk_norm_rotary(*normed, positions, Rope(table(10, 8)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("rot", "axes"), [(8, 1), (12, 1), (12, 3)])
def test_rotated_keys_and_values_land_in_their_slots(normed, rot, axes):
    torch.manual_seed(0)
    merged, positions = torch.randn(4, (3 + 2) * 12), torch.tensor([5, 0, 2, 9])
    q, k = (x.unflatten(-1, (-1, 12)) for x in merged.split([36, 24], -1))
    v = torch.randn(4, 2, 20)[..., :12]
    weights = (torch.randn(12), torch.randn(12)) if normed else (None, None)
    rope = Rope(table(10, rot), *weights, 1e-6, (2, 2, 1))
    positions = torch.stack((positions, positions.flip(0), positions)) if axes == 3 else positions
    want_q, want_k = qk_norm_rotary.reference(q, k, positions, rope)
    want_v = v.clone()
    k_cache, v_cache = (torch.full((3, 8, 2, 12), torch.nan) for _ in range(2))
    slots = torch.tensor([17, 11, 8, 21], dtype=torch.int32)
    got = rotary_write_kv(q, k, v, positions, rope, KVPlaces(k_cache, v_cache, slots))
    torch.testing.assert_close(got, want_q)
    torch.testing.assert_close(k_cache.view(-1, 2, 12)[slots], want_k)
    assert torch.equal(v_cache.view(-1, 2, 12)[slots], want_v)
    assert int(k_cache.isnan().sum()) == int(v_cache.isnan().sum()) == (24 - 4) * 2 * 12


def test_many_rows_to_a_program_and_few(provider, monkeypatch):
    """The same numbers, however programs share the heads of tokens."""
    if provider != "triton-shuffled":
        pytest.skip("the tile is the kernel's, and one order is enough")
    from hybridrt.kernels.attention import rotary_triton

    assert {rotary_triton.rotary_tile(rows, 64) for rows in (1, 128, 129)} == {(1, 1), (16, 4)}
    torch.manual_seed(0)
    q, k, positions = torch.randn(5, 3, 12), torch.randn(5, 2, 12), torch.tensor([5, 0, 2, 9, 1])
    rope, found = Rope(table(10, 8), torch.randn(12), torch.randn(12), 1e-6), []
    for tile in ((1, 1), (4, 2), (16, 4)):
        monkeypatch.setattr(rotary_triton, "rotary_tile", lambda *_, tile=tile: tile)
        found.append(qk_norm_rotary(q.clone(), k.clone(), positions, rope))
    for each in found:
        torch.testing.assert_close(each, qk_norm_rotary.reference(q, k, positions, rope))


def test_keys_and_values_of_padding_are_not_written():
    q, k, v = torch.randn(2, 3, 12), torch.full((2, 2, 12), torch.nan), torch.full((2, 2, 12), torch.nan)
    k[1] = v[1] = 1.0
    k_cache, v_cache = torch.zeros(2, 3, 8, 2, 12)
    slots, positions = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([1, 0])
    rotary_write_kv(q, k, v, positions, Rope(table(10, 8)), KVPlaces(k_cache, v_cache, slots))
    for cache in (k_cache, v_cache):
        assert not cache[0].any() and cache.isfinite().all() and cache.view(-1, 2, 12)[9].all()


def test_no_tokens():
    q, k = qk_norm_rotary(
        torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int64), Rope(table(4, 8))
    )
    assert q.shape == (0, 2, 8) and k.shape == (0, 1, 8)
