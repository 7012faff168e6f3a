"""Kernels for GPUs that we did not run on: they compile, and fit in the shared memory that a program may have."""

from pathlib import Path

import pytest

from hybridrt.base.device import COMPILED, KNOWN
from tests.support.sm90_process import Compiler

GPUS = [name for name, gpu in KNOWN.items() if gpu.capability in COMPILED]


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_the_most_demanding_kernels_fit(name: str, tmp_path: Path) -> None:
    """Larger tiles of the H200 ask for up to 137 KB where 99 KB are there. A product of pairs of bfloat16 is an
    instruction of sm_90."""
    compiler, room = Compiler(tmp_path / "errors", name), KNOWN[name].shared_memory
    try:
        usages = compiler("demanding")
    finally:
        compiler.close()
    assert {"_decode_kernel", "_extend_kernel", "_pass_kernel", "_outputs_kernel", "_matmul_kernel"} <= {
        usage["kernel"] for usage in usages
    }
    assert [usage for usage in usages if "error" in usage or usage["shared"] > room] == []
