"""Runs a benchmark's load on an engine of this process."""

import time
from collections.abc import Sequence
from typing import Any

from hybridrt.base.errors import HybridrtError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.bench.timing import Timing
from hybridrt.bench.workload import Work
from hybridrt.engine.api.llm import LLM


def run_engine(llm: LLM, work: Sequence[Work], concurrency: int | None, **params: Any) -> list[Timing]:
    """Submits each request at its arrival, at most `concurrency` at a time. Ctrl-C aborts what runs
    and returns the requests that have ended."""
    timings: list[Timing] = []
    try:
        _run(llm, work, concurrency, params, timings)
    except KeyboardInterrupt:
        llm.engine.abort_all()
        timings = [timing for timing in timings if timing.end]
    llm.engine.drain()
    return timings


def _run(
    llm: LLM, work: Sequence[Work], concurrency: int | None, params: dict[str, Any], timings: list[Timing]
) -> None:
    engine = llm.engine
    start = time.perf_counter()
    waiting, running = list(reversed(work)), dict[str, Timing]()
    while waiting or running:
        now = time.perf_counter() - start
        while waiting and waiting[-1].arrival <= now and (concurrency is None or len(running) < concurrency):
            each = waiting.pop()
            timing = Timing(each.arrival if concurrency is None else now, len(each.prompt))
            timings.append(timing)
            sampling = SamplingParams(max_tokens=each.max_tokens, seed=each.seed, ignore_eos=True, **params)
            try:
                running[engine.add_request(each.prompt, sampling)] = timing
            except HybridrtError as e:
                timing.error, timing.end = str(e), now
        if not running:
            time.sleep(max(waiting[-1].arrival - now, 0) if waiting else 0)
            continue
        deltas = engine.step()
        now = time.perf_counter() - start
        for delta in deltas:
            timing = running[delta.request_id]
            if delta.token_ids:
                timing.gains.append((now, len(delta.token_ids)))
                timing.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                timing.end, timing.error = now, None if delta.error is None else str(delta.error)
                del running[delta.request_id]
