"""What bench_start times has the names that it knows; it replaces them, and so runs in a process of its own."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.bench_start import REPLICAS, starts
from tests.test_structure import ROOT


@pytest.mark.slow
def test_every_timed_part_is_there() -> None:
    code = "from benchmarks.bench_start import Clock, _watch; _watch(Clock())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_replicas_differ_in_what_they_find() -> None:
    """Only the first one reads the disk, and only those of the snapshot find kernels and weights."""
    args = Namespace(checkpoint=Path("c"), snapshot=Path("s"), starts=REPLICAS, repeats=2, serial=False)
    first, another, writing, *kept = starts(args, [Path("a"), Path("b")])
    assert [start.cold for start in (first, another, writing, *kept)] == [True, False, False, False, False]
    assert len({first.cache, another.cache, writing.cache}) == 3 and first.prepared is another.prepared is None
    assert all((start.cache, start.prepared) == (writing.cache, writing.prepared) for start in kept)
    found = {"TRITON_CACHE_DIR": "s/kernels", "HYBRIDRT_PREPARED_WEIGHTS": "s/weights"}
    assert writing.variables().items() >= found.items()
