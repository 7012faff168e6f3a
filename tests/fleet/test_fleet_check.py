"""Fleets of processes under faults: the runs of benchmarks.fleet_check, small ones and whole ones."""

import pytest

from benchmarks.fleet_check import check, parse

SMALL = ["--replicas", "2", "--together", "6", "--every", "2"]
BY_HAND = [
    ["--replica", "double", "--faults", "kill"],
    # In the slow level tests/fleet/test_faults.py stops a replica and ends another one.
    ["--replica", "embedded", "--faults", "stop"],
    ["--replica", "double", "--faults", "scale"],
]
RUNS = [
    ["--replica", "double", "--faults", "kill", "--resume"],
    ["--replica", "prefill", "--faults", "kill"],
    ["--replica", "ray", "--faults", "kill"],
]


def run(options: list[str]) -> None:
    if "prefill" in options:
        pytest.importorskip("nixl", reason="it comes with the extra transfer")
    if "ray" in options:
        pytest.importorskip("ray", reason="it comes with the extra ray")
    report = check(parse(options))
    assert report.good and report.requests > 0, report
    assert "--resume" not in options or report.cut == 0, report


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [*RUNS, *(pytest.param(run, marks=pytest.mark.soak) for run in BY_HAND)], ids=" ".join
)
def test_nothing_is_lost(options: list[str]) -> None:
    run([*options, *SMALL, "--requests", "100" if "double" in options else "60"])


@pytest.mark.soak
@pytest.mark.parametrize("options", [*RUNS, *BY_HAND], ids=" ".join)
def test_nothing_is_lost_of_many(options: list[str]) -> None:
    run([*options, "--requests", "20000" if "double" in options else "1000"])
