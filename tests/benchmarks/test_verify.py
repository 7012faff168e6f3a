"""The benchmark of verify steps: scripts of what stays, and rows for what was asked."""

from pathlib import Path

import pytest

from benchmarks import bench_verify
from benchmarks.bench_verify import Bench, parse, script
from tests.support.tiny import write_tiny


def test_scripts_keep_runs_of_the_rate_asked_for() -> None:
    kept = [n for step in script(400, 20, 4, 0.7) for n in step]
    assert min(kept) == 1 and max(kept) == 5
    wanted = 1 + 0.7 + 0.7**2 + 0.7**3 + 0.7**4
    assert sum(kept) / len(kept) == pytest.approx(wanted, rel=0.02)
    assert {n for step in script(3, 5, 0, 0.7) for n in step} == {1}


def test_every_mode_batch_and_length_gets_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_verify, "STEPS", 3)
    model = str(write_tiny(tmp_path, tokenizer=False))
    options = ["--device", "cpu", "--batches", "1,3", "--drafts", "2,4", "--ctx", "60", "--repeats", "1"]
    rows = Bench(parse([model, *options])).run()
    found = [(row["mode"], row["drafts"], row["batch"]) for row in rows]
    verified = [(mode, n, batch) for mode in ("replay", "intermediate") for n in (2, 4) for batch in (1, 3)]
    assert found == [("classic", 0, 1), ("classic", 0, 3), *verified]
    assert all(row["plain steps"] > 0 and 1 <= row["tokens a step"] <= 1 + row["drafts"] for row in rows[2:])
