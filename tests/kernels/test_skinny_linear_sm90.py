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
    """No spills; the one-token kernel leaves registers for eight programs of its kind on a multiprocessor."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.sm90_skinny_linear"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr[-2000:]
    usages = [json.loads(line) for line in found.stdout.splitlines()]
    assert [u["kernel"] for u in usages].count("_matvec_kernel") == 4
    assert [u["kernel"] for u in usages].count("_matmul_kernel") == 12
    for usage in usages:
        assert usage["shared"] <= 227 * 1024, usage
        if usage["kernel"] == "_matvec_kernel":
            assert usage["registers"] <= 64, usage
        # ptxas parks an address or two of the other one, far from any limit, to fit one more program.
        spills = 16 if usage["kernel"] == "_matmul_kernel" else 0
        assert usage["stack"] <= spills, f"{usage} spills (Triton {triton.__version__})"
