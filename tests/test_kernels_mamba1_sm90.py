import json
import os
import subprocess
import sys
from pathlib import Path

import triton

ROOT = Path(__file__).parent.parent


def test_kernels_fit_a_multiprocessor_of_sm90() -> None:
    """No spills; so few registers that 800 threads share a multiprocessor; and the scan keeps a channel in
    one thread, so that its loop over tokens needs no shared memory."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.sm90_mamba1"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    usages = [json.loads(line) for line in found.stdout.splitlines()]
    assert {u["kernel"] for u in usages} == {"_update_kernel", "_chunks_kernel", "_heads_kernel", "_outputs_kernel"}
    for usage in usages:
        assert usage["stack"] == 0, f"{usage} spills (Triton {triton.__version__})"
        assert usage["registers"] <= 80, usage
        assert usage["shared"] <= (1024 if usage["kernel"] == "_update_kernel" else 0), usage
