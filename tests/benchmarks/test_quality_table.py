"""Options that may change numbers keep within their limits, and a row beyond its limit is named."""

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality_table import EXACT, ROWS, TASKS, measure, regressions, table

QUICK = ("plain", "int4 weights", "int8 states")  # weights and states; tests/engine/test_kv_codes.py has codes of KV


def figures(**changes: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {row.name: {"perplexity": 10.0, "right": 20} for row in ROWS}
    found |= {name: {"equal": 8, "of": 8} for name in EXACT}
    return found | changes


def test_a_row_beyond_its_limit_is_named() -> None:
    assert regressions(figures()) == []
    assert regressions(figures(replay={"perplexity": 10.001, "right": 20})) == [
        "replay: perplexity +0.010%, at most +0.001%"
    ]
    assert regressions(figures(bfloat16={"perplexity": 9.9, "right": 18})) == ["bfloat16: 18 tasks right, plain 20"]
    assert regressions(figures(**{"prefix cache": {"equal": 7, "of": 8}})) == ["prefix cache: 7 of 8 answers equal"]
    (text,) = regressions({name: {**row, "perplexity": 40.0} for name, row in figures().items()})
    assert "plain: perplexity 40.000" in text
    assert table(figures()).count("| 10.0000 |") == len(ROWS)


def test_tasks_have_two_continuations() -> None:
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    assert len(tasks) > 20
    assert all(task.keys() == {"prompt", "right", "wrong"} and task["right"] != task["wrong"] for task in tasks)


@pytest.mark.parametrize(
    "names",
    [pytest.param(QUICK, marks=pytest.mark.slow), pytest.param([row.name for row in ROWS], marks=pytest.mark.soak)],
    ids=["few", "all"],
)
def test_no_option_is_beyond_its_limit(names: Sequence[str]) -> None:
    found = measure(Path(sysconfig.get_path("stdlib")), rows=[row for row in ROWS if row.name in names])
    assert {*names, *EXACT} == found.keys()
    assert regressions(found) == [], table(found)
