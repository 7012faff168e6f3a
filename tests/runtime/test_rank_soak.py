"""Thousands of steps of random schedules on two ranks, and on two replicas that share experts."""

from collections.abc import Callable
from typing import Any

import pytest

from hybridrt import SpeculativeConfig
from hybridrt.parallel.rank_start import start_ranks
from tests.support.checkpoints import CheckpointStore
from tests.support.rank_soak import soak_processes, soak_ranks, soak_replicas

DRAFTS = SpeculativeConfig(num_draft_tokens=3, state_mode="replay")
RANKS: list[tuple[str, dict[str, Any]]] = [
    ("qwen-split", {"expert_parallel": True}),
    ("falcon-split", {"state_mode": "replay"}),
    ("falcon-split", {"speculative": DRAFTS}),
    ("nemotron-split_groups", {"prefix_cache": False}),
]
REPLICAS: list[tuple[str, dict[str, Any]]] = [("qwen-split", {}), ("nemotron-split", {"speculative": DRAFTS})]


@pytest.mark.slow
@pytest.mark.parametrize("run", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_ranks_for_a_while(run: int, checkpoints: CheckpointStore) -> None:
    name, options = RANKS[run]
    assert soak_ranks(name, 30, checkpoints, tp_size=2, **options)["finished"] > 0


@pytest.mark.soak
def test_processes_for_a_while(checkpoints: CheckpointStore) -> None:
    """The slow level has ranks in one process, above, and few steps in processes (test_tensor_parallel.py)."""
    name, options = RANKS[0]
    ranks = start_ranks(2, "cpu")
    try:
        assert soak_processes(name, 30, ranks, checkpoints, device="cpu", **options)["finished"] > 0
    finally:
        ranks.close()


@pytest.mark.slow
def test_replicas_for_a_while(checkpoints: CheckpointStore) -> None:
    name, options = REPLICAS[0]
    assert all(counts["finished"] > 0 for counts in soak_replicas(name, 40, checkpoints, **options))


@pytest.mark.soak
@pytest.mark.parametrize("run", range(len(RANKS)))
def test_ranks(run: int, checkpoints: CheckpointStore, record_property: Callable[[str, object], None]) -> None:
    name, options = RANKS[run]
    counts = soak_ranks(name, 2000, checkpoints, tp_size=2, **options)
    record_property("soak", counts)
    assert min(counts["finished"], counts["aborted"], counts["retractions"]) > 0


@pytest.mark.soak
@pytest.mark.parametrize("run", range(len(REPLICAS)))
def test_replicas(run: int, checkpoints: CheckpointStore, record_property: Callable[[str, object], None]) -> None:
    name, options = REPLICAS[run]
    for counts in soak_replicas(name, 2000, checkpoints, **options):
        record_property("soak", counts)
        assert min(counts["finished"], counts["aborted"]) > 0
