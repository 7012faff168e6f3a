"""A start with an empty cache: children compile every kernel that it launches, and the next start needs no children."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_start import RESULT
from tests.gpu.rig import DEVICE, FAMILIES, PRODUCTION
from tests.support.checkpoints import CheckpointStore

pytestmark = PRODUCTION
ROOT = Path(__file__).parents[2]


def start(model: Path, cache: Path) -> dict[str, Any]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "HYBRIDRT_COMPILE_WORKERS": "4"}
    options = {"device": DEVICE, "dtype": "bfloat16", "max_model_len": 128, "max_running_requests": 24}
    child = json.dumps({"model": str(model), "options": options, "spawned": time.time()})
    command = [sys.executable, "-m", "benchmarks.bench_start", "--child", child]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "kernels are missing" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.split(RESULT)[-1])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_children_compile_all_that_a_start_launches(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    model = checkpoints[name].path
    first = start(model, tmp_path)
    assert first["compiled here"] == {} and first["compiled by children"]["kernels"] > 40
    second = start(model, tmp_path)
    assert second["compiled here"] == {} and second["compiled by children"] is None
