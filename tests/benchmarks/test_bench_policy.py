"""The policy of few slots, held to what it reaches: without a model, in simulated time."""

import pytest

from benchmarks.bench_policy import VOCAB, Case, measure
from benchmarks.bench_prefix import recomputed
from benchmarks.traces import Shape
from hybridrt.engine.cache.prefix_store import GRID


@pytest.mark.parametrize(("trace", "least"), [("chat", 0.85), ("branching", 0.9), ("agents", 0.93), ("shared", 0.99)])
def test_hit_rates_with_few_slots(trace: str, least: float) -> None:
    """Smaller and shorter than the benchmark, so a little below its shares."""
    row = measure(Case(trace, Shape(12, 4, 160, 20, VOCAB, 0), 0.0, 2, 4), 150)
    assert least < row["of bound"] <= 1 and row["bound"] <= row["unlimited"]


def test_runs_are_the_same_each_time_and_arrivals_are_spread() -> None:
    case = Case("chat", Shape(4, 2, 80, 6, VOCAB, 1), 0.6, 2, 4, think=5.0)
    first, second = (measure(case, 50) for _ in range(2))
    assert first == second
    assert all(item.delay > 0 for item in case.items())


@pytest.mark.parametrize("load", [0.0, 0.6])
def test_a_turn_computes_its_new_tokens_and_little_else(load: float) -> None:
    """With room for all states: at most GRID tokens beside those that no earlier request had. The one exception is a
    system prompt: the second conversation leaves the state at its end, unless it waits when the first one begins."""
    ran = Case("chat", Shape(4, 5, 120, 40, VOCAB, 0), load, 2, 60).play()
    by_admission = sorted(ran, key=lambda each: each.metrics.admission_time or 0.0)
    redone = {each.item.id: count for each, count in zip(by_admission, recomputed(ran), strict=True)}
    assert max(count for request, count in redone.items() if not request.endswith(".0")) <= GRID
    assert sum(count > GRID for count in redone.values()) == (load > 0)
