"""The policy of few slots, held to what it reaches: without a model, in simulated time."""

import pytest

from benchmarks.bench_policy import VOCAB, Case, measure
from benchmarks.traces import Shape


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
