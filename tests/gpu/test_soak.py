"""Thousands of steps of random schedules on a GPU: nothing is lost, memory stays flat, tokens stay right.

HYBRIDRT_SOAK_STEPS sets how many steps the soak has in all (20,000 unless said otherwise).
"""

import os
from collections.abc import Callable

import pytest

from tests.gpu.rig import DEVICE, PRODUCTION
from tests.support.checkpoints import CheckpointStore
from tests.support.soak import RUNS, soak

pytestmark = PRODUCTION
STEPS = int(os.environ.get("HYBRIDRT_SOAK_STEPS", "20000"))
Record = Callable[[str, object], None]


@pytest.mark.parametrize("run", range(len(RUNS)))
def test_random_schedules_for_a_while(run: int, checkpoints: CheckpointStore) -> None:
    assert soak(run, 40, DEVICE, checkpoints)["finished"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("run", range(len(RUNS)))
def test_random_schedules(run: int, checkpoints: CheckpointStore, record_property: Record) -> None:
    counts = soak(run, STEPS // len(RUNS), DEVICE, checkpoints)
    record_property("soak", counts)
    assert min(counts["finished"], counts["aborted"], counts["retractions"]) > 0
