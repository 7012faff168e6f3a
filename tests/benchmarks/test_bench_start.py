"""What bench_start times has the names that it knows; it replaces them, and so runs in a process of its own."""

import subprocess
import sys

import pytest

from tests.test_structure import ROOT


@pytest.mark.slow
def test_every_timed_part_is_there() -> None:
    code = "from benchmarks.bench_start import Clock, _watch; _watch(Clock())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
