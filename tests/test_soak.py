"""Thousands of steps of random schedules on a CPU: nothing is lost and tokens stay right."""

from collections.abc import Callable

import pytest

from tests.support.checkpoints import CheckpointStore
from tests.support.soak import RUNS, soak

Record = Callable[[str, object], None]


@pytest.mark.slow
@pytest.mark.parametrize("run", [pytest.param(i, marks=[pytest.mark.soak] * (i % 2)) for i in range(len(RUNS))])
def test_random_schedules_for_a_while(run: int, checkpoints: CheckpointStore) -> None:
    assert soak(run, 40, "cpu", checkpoints)["finished"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_random_schedules(run: int, checkpoints: CheckpointStore, record_property: Record) -> None:
    counts = soak(run, 4000, "cpu", checkpoints)
    record_property("soak", counts)
    assert min(counts["finished"], counts["aborted"], counts["retractions"]) > 0
