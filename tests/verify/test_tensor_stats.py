"""Statistics of tensors, compared with those of plain formulas."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridrt.verify import tensor_stats
from hybridrt.verify.tensor_stats import SAMPLE, SAMPLES, scan

SHAPES = [(1,), (7,), (33, 5), (2, 16, 16), (300, 70)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("most", [1 << 8, 1 << 24])
def test_they_follow_from_all_numbers(
    tmp_path: Path, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most`: bytes that are read together."""
    monkeypatch.setattr(tensor_stats, "MOST_BYTES", most)
    generator = torch.manual_seed(0)
    tensors = {f"t{i}": (torch.randn(shape, generator=generator) * 9).to(dtype) for i, shape in enumerate(SHAPES)}
    tensors["t3"][0] = 0
    if dtype.is_floating_point:
        tensors["t4"][3, :2] = torch.tensor([math.nan, -math.inf])
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    found = list(scan({file: sorted(tensors)}, sampled=False))
    assert [each.key for each in found] == sorted(tensors)
    for each in found:
        tensor = tensors[each.key]
        assert each.sha256 == hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        assert each.shape == tuple(tensor.shape) and (each.zeros > 0) == (each.key == "t3")
        if not dtype.is_floating_point:
            assert (each.rms, each.peak, each.not_finite) == (0.0, 0.0, 0)
            continue
        numbers = tensor[tensor.isfinite()].double()
        assert each.not_finite == tensor.numel() - len(numbers)
        assert each.rms == pytest.approx(math.sqrt(float(numbers.square().sum()) / tensor.numel()))
        assert each.mean == pytest.approx(float(numbers.sum()) / tensor.numel(), abs=1e-6)
        assert each.peak == pytest.approx(float(numbers.abs().max()))


def test_large_tensors_are_read_at_some_places(tmp_path: Path) -> None:
    tensor, file = torch.zeros(SAMPLE * SAMPLES), tmp_path / "model.safetensors"
    tensor[0], tensor[-8], tensor[SAMPLE // 2] = 3.0, -4.0, 100.0  # the last is between two places
    save_file({"t": tensor}, file)
    (found,) = scan({file: ["t"]}, sampled=True)
    assert (found.peak, len(found.segments), found.zeros, found.sha256) == (4.0, SAMPLES, SAMPLES - 2, "")
    assert found.segments[0] == pytest.approx(3.0 / math.sqrt(SAMPLE / 4))
    (found,) = scan({file: ["t"]}, sampled=False)
    assert found.peak == 100.0 and found.sha256
