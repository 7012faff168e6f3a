"""Candidates that end their process, hang or fail: each is refused, and the others are measured.

A start of the process takes seconds. Tests that end it come after those that need it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridrt.base.errors import EngineError
from hybridrt.kernels.dense.skinny_linear_triton import TILES
from hybridrt.runtime.tune.bench_process import BenchProcess, RemoteBench
from hybridrt.runtime.tune.measure import BenchLostError, Measured, measure
from hybridrt.runtime.tune.tune import tune
from tests.support import bench_child
from tests.support.bench_child import BUG, CPU, ENDS, FAULTS, FULL, HANGS, RACES, RIGHT, SHAPE, tile


@pytest.fixture(scope="module")
def process() -> Iterator[BenchProcess]:
    """Its module is found by path: a child imports nothing from the current directory."""
    with pytest.MonkeyPatch.context() as only:
        only.syspath_prepend(str(Path(bench_child.__file__).parent))
        own = BenchProcess(CPU, "bench_child", seconds=60.0)
        yield own
        own.end()


def measured(process: BenchProcess, monkeypatch: pytest.MonkeyPatch, *splits: int) -> Measured:
    monkeypatch.setattr(TILES, "built_in", lambda *_: tile(RIGHT))
    monkeypatch.setattr(TILES, "candidates", lambda *_: [tile(split) for split in splits])
    return measure(TILES, SHAPE, CPU, process.bench("skinny_linear", SHAPE, {}))


def test_a_candidate_that_ends_its_process_is_refused(process: BenchProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(process, monkeypatch, RIGHT, ENDS, FAULTS, FULL, 9)
    assert found.values == tile(9) and found.won and found.same_bits and found.candidates == 4
    assert {refused.values["split"]: refused.why for refused in found.refused} == {
        ENDS: "its process has ended",
        FAULTS: "CUDA error: an illegal memory access was encountered",
        FULL: "it does not fit this GPU: OutOfMemoryError",
    }


def test_a_mistake_of_ours_is_no_refusal(process: BenchProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="a measurement has failed: KeyError"):
        measured(process, monkeypatch, BUG)


def test_a_shape_that_does_not_fit_or_whose_built_in_choice_fails_is_skipped(
    process: BenchProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TILES, "built_in", lambda *_: tile(RIGHT))
    monkeypatch.setattr(TILES, "candidates", lambda *_: [tile(RIGHT), tile(9)])
    shapes = [("skinny_linear", SHAPE._replace(rows=rows)) for rows in (7, 128, 9)]
    found = tune(shapes, CPU, process.bench, 60.0, {}, lambda *_: None)
    assert [m.shape for m in found.measured] == [SHAPE]
    assert "CUDA out of memory" in found.skipped[0]
    assert "with its built-in choice its process has ended" in found.skipped[1]


def test_a_race_that_ends_the_process_leaves_the_built_in_choice(
    process: BenchProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(process, monkeypatch, 9, RACES)
    assert found.values == tile(RIGHT) and not found.won
    assert [refused.values for refused in found.refused] == [tile(9), tile(RACES)]
    assert "in the race" in found.refused[0].why


def test_a_candidate_that_hangs_is_refused(process: BenchProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.bench("skinny_linear", SHAPE, {})  # which starts the process
    monkeypatch.setattr(process, "_seconds", 3.0)
    with pytest.raises(BenchLostError, match="it was not done after 3 s"):
        RemoteBench(process, "skinny_linear", SHAPE, {}).check(tile(HANGS))


def test_a_process_that_does_not_start_is_said() -> None:
    with pytest.raises(EngineError, match="does not start"):
        BenchProcess(torch.device("cpu"), "hybridrt.no_such_module").bench("skinny_linear", SHAPE, {})
