"""The benchmark of structured outputs: every case gets a row, and each target a line."""

import sys

import pytest

from benchmarks import bench_structured
from benchmarks.bench_structured import CASES, Row, verdicts


@pytest.mark.slow
def test_cases_and_targets_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--batches", "2", "--prompt", "8", "--output", "16", "--turns", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_structured", *options])
    bench_structured.main()
    lines = capsys.readouterr().out.splitlines()
    assert [f"case='{case}'" in line for case, line in zip(CASES, lines[-8:-4], strict=True)] == [True] * len(CASES)
    assert lines[-4] == "batch 2:" and all("tokens/s" in line and "at least" in line for line in lines[-3:-1])
    assert "masks were there before the forward pass had ended" in lines[-1]


def test_targets() -> None:
    def of(removed: float, every: float, in_time: float) -> list[bool]:
        ratios = {"removed": removed, "none": 1.0, "all": every}
        lines = verdicts([Row(case, 32, 100 * r, r, [], in_time, None) for case, r in ratios.items()])
        return ["NOT MET" not in line for line in lines]

    assert of(1.01, 0.98, 1.0) == [True] * 3
    assert of(1.03, 0.96, 0.98) == [False] * 3
