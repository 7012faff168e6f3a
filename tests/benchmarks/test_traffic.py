"""Loads of a server in simulated time: first tokens, time between tokens and tokens a second keep their limits."""

import pytest

from benchmarks import simulate_serving
from benchmarks.traffic_loads import LIMITS, LOADS

QUICK = ("same-text", "very-long")


def missed(load: str, seed: int) -> list[str]:
    found, without = (simulate_serving.play(load, target, seed) for target in ("auto", None))
    limits = [limit for limit in LIMITS if limit.load == load]
    return [
        f"seed {seed}: {limit} is {found[limit.figure]:.1f}, without a policy {without[limit.figure]:.1f}"
        for limit in limits
        if not limit.holds(found[limit.figure], without[limit.figure])
    ]


@pytest.mark.parametrize(
    "load", [load if load in QUICK else pytest.param(load, marks=pytest.mark.slow) for load in LOADS]
)
def test_the_policy_keeps_its_limits(load: str) -> None:
    assert missed(load, 0) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1000, 2000])
def test_with_other_arrivals_few_limits_are_missed(seed: int) -> None:
    """They were set for those of seed 0."""
    found = [text for load in LOADS for text in missed(load, seed)]
    assert len(found) <= 2, found


def test_simulated_times_are_those_that_were_measured() -> None:
    """A server on an H200 without a target: milliseconds to the first token (mean, greatest) and between tokens."""
    for load, mean, most, between in (("very-long", 1260, 2100, 286), ("long", 178, 344, 99)):
        found = simulate_serving.play(load, None)
        assert found["first mean"] == pytest.approx(mean, rel=0.12)
        assert found["first max"] == pytest.approx(most, rel=0.12)
        assert found["between p99"] == pytest.approx(between, rel=0.12)
