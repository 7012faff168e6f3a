"""The load generator: arrivals at the rate asked for, times that belong to the right request."""

import argparse
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import simulate_serving
from benchmarks.bench_serving import Timing, Work, arriving, make_work, measure, percentile, serve, summary
from hybridrt import LLM, SamplingParams
from tests.support.tiny import write_tiny

ARGS = argparse.Namespace(requests=12, prompt=10, output=6, shares=[0.5], temperature=0.0, seed=3)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (1, 20, 21, 50, 99, 100)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]


def test_timings() -> None:
    timing = Timing(2.0)
    for gained, now in ((0, 2.5), (1, 3.0), (0, 3.5), (2, 4.0)):
        timing.saw(gained, now)
    assert timing.first == 1.0 and timing.gaps == [1.0, 0.0]
    row = summary("x", [timing, Timing(0.0, [1.0])], 4.0)
    assert (row["requests/s"], row["tok/s"], row["first token p50 ms"]) == (0.5, 1.0, 1000.0)
    assert (row["between tokens p50 ms"], row["between tokens p99 ms"]) == (0.0, 1000.0)


def test_arrivals_have_the_rate_asked_for() -> None:
    work = make_work(argparse.Namespace(**(vars(ARGS) | {"requests": 4000})), 50)
    times = [item.arrival for item in arriving(work, 20.0, 1)]
    assert times == sorted(times) and times[-1] == pytest.approx(200.0, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap > 0.05 for gap in gaps) / len(gaps) == pytest.approx(2.718281828**-1, abs=0.03)


def test_every_token_is_seen(tmp_path: Path) -> None:
    model = str(write_tiny(tmp_path, tokenizer=False))
    llm = LLM(model, load_format="dummy", device="cpu", max_model_len=32, max_running_requests=3)
    rows = measure(llm.engine, ARGS)
    expected = sum(item.params.max_tokens or 0 for item in make_work(ARGS, llm.model_config.vocab_size))
    assert [row["load"] for row in rows] == ["saturated", "50%"]
    for row in rows:
        assert row["tok/s"] / row["requests/s"] * ARGS.requests == pytest.approx(expected)
        assert 0 < row["first token p50 ms"] <= row["first token p99 ms"]


def test_no_step_seems_to_end_at_once_although_the_host_reads_it_late() -> None:
    """Prompts without a graph, whose launch takes longer than the steps before them: those ends are not seen."""
    times = simulate_serving.StepTimes((), noise=0.0)
    device = simulate_serving.SimulatedDevice(times, 0)
    engine = simulate_serving.engine(device, times, 4096, 50.0, 8)
    assert engine.policy is not None
    with mock.patch.object(engine.policy.cost, "observe") as observe:
        serve(engine, [Work([5] * 600, SamplingParams(max_tokens=20), 0.03 * i) for i in range(8)], device)
    took = [(call.args[1], len(call.args[0])) for call in observe.call_args_list]
    assert min(seconds / steps for seconds, steps in took) > 4e-3 and max(steps for _, steps in took) > 1


@pytest.mark.slow
def test_a_target_holds_in_simulated_time_and_gives_way_to_a_deep_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device whose steps with prompts are graphs, and whose other steps take longer to launch than to run: 30 ms,
    with which the limits were set."""
    monkeypatch.setattr(simulate_serving, "HOST", 30.0)
    monkeypatch.setattr(simulate_serving, "HOST_STREAMS", 0.0)
    args = simulate_serving.parse(["--requests", "250", "--shares", "0.8"])
    full, loaded = simulate_serving.simulate(args, 4096, None, 0, 41.9)
    full_target, loaded_target = simulate_serving.simulate(args, 4096, 15.0, 0, 41.9)
    assert loaded["between tokens p99 ms"] > 30 and loaded_target["between tokens p99 ms"] < 15
    assert loaded["first token p99 ms"] < 150 and loaded_target["first token p99 ms"] < 220
    assert full_target["requests/s"] > 0.97 * full["requests/s"] and full_target["error"] < 0.03
