import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def test_kernels_fit_a_multiprocessor_of_sm90() -> None:
    """No spills, and two programs or more share a multiprocessor's 64 K registers and 227 KB of shared memory."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.sm90_mamba2"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    usages = [json.loads(line) for line in found.stdout.splitlines()]
    assert {u["kernel"] for u in usages} >= {
        "_update_kernel",
        "_stream_kernel",
        "_fold_kernel",
        "_outputs_kernel",
        "_varlen_kernel",
    }
    for usage in usages:
        assert usage["stack"] == 0, f"{usage} spills (Triton {triton.__version__})"
        assert usage["shared"] <= 227 * 1024 // 2, usage
