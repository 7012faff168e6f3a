"""The benchmark of images: every figure is there, and flops are those that torch counts."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bench_images import measure, parse
from hybridrt.bench.floor import encoder_flops
from tests.models.test_loader import load
from tests.models.test_vision import LFM2, LFM3, OMNI, QWEN, pictures, seeing
from tests.support.checkpoints import CheckpointStore

aten = torch.ops.aten
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 64}
pytestmark = pytest.mark.slow


def test_every_figure_is_measured(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    model = str(seeing(checkpoints[QWEN].path, tmp_path / "model", **PROCESSOR))
    options = "--device cpu --images 3 --side 16 --text 6 --rows 2 --ctx 12 --batches 1,2 --first 8 --turns 1"
    rows = measure(parse([model, *options.split(), "--prompts", "2", "--repeats", "1"]))
    limits = {row["what"]: row["limit"] for row in rows if "limit" in row}
    assert sorted(limits.values()) == [0.5, 1.01, 1.01, 1.01, 1.2, 1.2, 1.2, 1.2, 1.3]


@pytest.mark.parametrize("name", [QWEN, LFM2, LFM3, OMNI])
def test_flops_of_towers(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Of products as torch counts them, and of attention, which it does not count on a CPU."""
    path = seeing(checkpoints[name].path, tmp_path / "model")
    tower = load(path).tower
    assert tower is not None
    inputs = pictures(tower.spec, [(4, 6), (2, 4)])
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        tower.encode(inputs)
    counts = counted.get_flop_counts()["Global"]
    products = sum(counts.get(op, 0) for op in (aten.mm, aten.addmm, aten.convolution))
    lengths = [tower.spec.num_prefix + rows * columns for rows, columns in [(4, 6), (2, 4)]]
    layers = tower.spec.num_layers - len(tower.spec.convolutions)
    attention = layers * sum(4 * n * n * tower.spec.hidden_size for n in lengths)
    assert encoder_flops(tower, [each.grid for each in inputs]) == products + attention
