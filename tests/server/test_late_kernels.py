"""Ready means ready, without a GPU: after the warm-up a mixed load launches no kernel that was not launched before.
tests/gpu/test_ready.py holds the same on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import CheckpointStore
from tests.support.one_layer import write_first_layer

ROOT = Path(__file__).parents[2]


def late_kernels(*arguments: str) -> list[str]:
    """Names of kernels that would be compiled after the warm-up (tests/support/late_kernels.py)."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.late_kernels", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ready"] > 60
    late: list[str] = found["late"]
    return late


@pytest.mark.parametrize(
    "name, drafts",
    [pytest.param("embedded", ["3"], marks=pytest.mark.slow), pytest.param("kimi-plain", [], marks=pytest.mark.soak)],
)
def test_the_warm_up_launches_every_kernel(
    name: str, drafts: list[str], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """One layer of the built-in model launches the kernels of all."""
    model = str(write_first_layer(tmp_path / "model") if name == "embedded" else checkpoints[name].path)
    assert late_kernels(model, *drafts) == []


@pytest.mark.slow
def test_long_prompts_launch_none_later(tmp_path: Path) -> None:
    """With the heads of Falcon-H1-7B, and one layer: attention has other tiles for prompts of other lengths, in graphs
    and without."""
    config = json.loads((ROOT / "benchmarks/configs/falcon-h1-7b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert late_kernels(str(tmp_path), "long") == []
