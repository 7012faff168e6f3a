"""The cost of HTTP compared with the engine alone, at a small scale: both ways compute the same tokens on a double of
a device. How long they take is for benchmarks/log/serving.md."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_http
from benchmarks.bench_host import VOCAB, build
from hybridrt.bench.workload import WorkloadConfig, make_work
from tests.support.levels import sweep

STREAMS, STEP = 4, 0.02


@pytest.mark.parametrize(("concurrency", "rate"), sweep([(STREAMS, None), (None, 20.0)], 2), ids=["closed", "open"])
def test_a_server_and_its_engine_alone_run_the_same_load(
    concurrency: int | None, rate: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WorkloadConfig(requests=8, prompt_tokens=4, output_tokens=10, vocab=VOCAB, rate=rate)
    done: list[tuple[int, int, int]] = []
    figures = bench_http.figures

    def note(found: dict[str, Any]) -> dict[str, float]:
        done.append((found["requests"], found["failed"], found["output_tokens"]))
        return figures(found)

    monkeypatch.setattr(bench_http, "figures", note)
    with build(str(tmp_path), STREAMS, 16, 32, text=True) as llm:
        bench_http.run_on_double(llm, STEP, STEP)
        rows = bench_http.compare(llm, load, concurrency, 1, False)
    assert done == [(8, 0, sum(work.max_tokens for work in make_work(load)))] * 2
    assert [row["way"] for row in rows] == ["engine", "http"]
    assert all(0 < row["tokens_per_second"] <= STREAMS / STEP for row in rows), "no faster than the double"
