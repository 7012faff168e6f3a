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
    """No spills; and the scan keeps a channel in one thread, so that its loops over tokens need no shared memory and so
    few registers that twenty programs share a multiprocessor's 64 K."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.sm90_mamba1"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    usages = [json.loads(line) for line in found.stdout.splitlines()]
    assert {u["kernel"] for u in usages} == {"_update_kernel", "_chunks_kernel", "_heads_kernel", "_outputs_kernel"}
    for usage in usages:
        assert usage["stack"] == 0, f"{usage} spills (Triton {triton.__version__})"
        loop = usage["kernel"] in ("_chunks_kernel", "_outputs_kernel")
        assert usage["registers"] <= (100 if loop else 168), usage
        assert usage["shared"] <= (0 if loop else 2048), usage
