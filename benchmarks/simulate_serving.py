"""bench_serving in simulated time, without a model or a GPU: what sizes of chunks and targets would give.

    python -m benchmarks.simulate_serving --chunk 4096,1024,512,256 --target-itl-ms 10,15,20 --seeds 4

Engine and scheduler are the real ones. The executor computes nothing; a step takes as long as one of Falcon-H1-7B takes
on an H200, by `StepTimes`, with normal noise. A seed's run takes seconds and comes out the same each time. Each row is
the mean over seeds; rates of arrival are shares of `--saturated`, or of what the first run finds.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.bench_policy import NUM_PAGES, PAGE_SIZE, VOCAB, NoMasks, SimulatedExecutor
from benchmarks.bench_serving import LEAST_CONTEXT, measure, show, sizes, targets
from hybridrt.base.config import EngineConfig
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.mem_cache.pools.page_demand import PageDemand
from hybridrt.runtime.replay.graph_runner import buckets
from hybridrt.runtime.step.pack_padded import DECODE_ROWS, PROMPT_TOKENS, Bucket, StateSaves, make_buckets
from hybridrt.runtime.step.plan import StepHandle, StepPlan, StepResult

_DECODE_GRAPHS = buckets(1024)
TILE = 128


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step. Fitted by hand to measured ones: decode steps of 32, 64 and 128 rows (5.8, 7.2, 9.7), and
    graphs of 128, 192 ... 512 prompt tokens beside 64 rows (9.1, 10.3, 12.4, 13.1, 15.5, 15.8, 17.6). Products go in
    tiles of 128 tokens, decode rows included.

    Attributes:
        noise: standard deviation of the logarithm of a step's time.
    """

    buckets: Sequence[Bucket]
    noise: float = 0.015

    def device(self, plan: StepPlan) -> tuple[float, bool]:
        """Of a step, and whether a graph runs it."""
        rows, tokens = len(plan.decode), sum(len(row.tokens) for row in plan.extend)
        if not tokens:
            return 4.35 + 0.0395 * next(size for size in _DECODE_GRAPHS if size >= rows), True
        bucket = next((bucket for bucket in self.buckets if bucket.holds(plan, StateSaves.NONE)), None)
        if bucket is None:
            return 4 + 0.0235 * tokens + 0.028 * rows, False
        if not rows:
            return max(2 + 0.022 * bucket.tokens, 6.2), True
        tiles = -(-sum(bucket) // TILE) * TILE
        return 4.1 + 0.0145 * tiles + 0.007 * sum(bucket) + 0.011 * rows, True

    def host(self, plan: StepPlan, graph: bool) -> float:
        """Of the launch."""
        return (1.4 if plan.extend else 0.7) if graph else 37.0


@dataclass(frozen=True)
class Running(NoMasks):
    """A launched step, which ends at `end`."""

    device: "SimulatedDevice"
    end: float
    answer: StepResult

    def ready(self) -> bool:
        return self.device.monotonic() >= self.end

    def result(self) -> StepResult:
        self.device.sleep(max(self.end - self.device.monotonic(), 0.0))
        return self.answer


class SimulatedDevice(SimulatedExecutor):
    """Runs one step after the other beside the host, whose clock it is."""

    def __init__(self, times: StepTimes, seed: int) -> None:
        super().__init__()
        self._times, self._draw, self._free = times, random.Random(seed), 0.0

    def launch(self, plan: StepPlan) -> StepHandle:
        seconds, graph = self._times.device(plan)
        start = max(self.monotonic(), self._free)
        self.sleep(self._times.host(plan, graph) / 1e3)
        end = start + seconds / 1e3 * self._draw.lognormvariate(0, self._times.noise)
        self._free = end if graph else max(end, self.monotonic())  # the last kernel is launched at the end
        return Running(self, self._free, self._answer(plan))

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds + 1e-6)  # so that it is never rounded to nothing


def engine(device: SimulatedDevice, times: StepTimes, chunk: int, target_ms: float | str | None, rows: int) -> Engine:
    """One without a prefix cache; its scheduler has the device's clock."""
    pools = CacheCoordinator(rows, rows, [NUM_PAGES], [PageDemand(PAGE_SIZE)], prefix_cache=False)
    config = EngineConfig("simulated", target_itl_ms=target_ms)  # type: ignore[arg-type]
    if target := TrafficPolicy.from_config(config, torch.device("cuda"), times.buckets):
        target.clock = device.monotonic
    return Engine(device, pools, EngineLimits(VOCAB, 2 * LEAST_CONTEXT, chunk), target=target)


def simulate(
    args: argparse.Namespace, chunk: int, target_ms: float | str | None, seed: int, saturated: float | None
) -> list[dict[str, Any]]:
    """Rows of `bench_serving.measure`, with the median error of the predicted times."""
    times = StepTimes(sorted(make_buckets(args.decode_rows, args.prompt_tokens), key=sum))
    device = SimulatedDevice(times, seed)
    args = argparse.Namespace(**vars(args), seed=seed, temperature=0.0)
    simulated = engine(device, times, chunk, target_ms, args.max_running)
    with mock.patch("hybridrt.engine.request.sample_request.time", device), mock.patch("benchmarks.bench_serving.show"):
        found = measure(simulated, args, saturated, device)
    return [row | {"error": simulated.counters().step_cost_error or 0.0} for row in found]


def mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of rows of one load."""
    numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
    return rows[0] | {name: statistics.fmean(row[name] for row in rows) for name in numbers}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512, help="mean prompt length in tokens")
    parser.add_argument("--output", type=int, default=128, help="mean output length in tokens")
    parser.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",") if x], default=[0.5, 0.8])
    parser.add_argument("--saturated", type=float, help="requests a second; None: what the first run finds")
    parser.add_argument("--max-running", type=int, default=128, help="requests that decode together")
    parser.add_argument("--chunk", type=sizes, default=[4096], help="tokens of a step; several sizes: a run of each")
    parser.add_argument("--target-itl-ms", type=targets, default=[15.0], help="of several, a run of each")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, from seed 0 on")
    parser.add_argument("--prompt-tokens", type=sizes, default=PROMPT_TOKENS, help="of the graphs")
    parser.add_argument("--decode-rows", type=sizes, default=DECODE_ROWS, help="of the graphs")
    return parser.parse_args(arguments)


def main() -> None:
    args, saturated = parse(), None
    runs = [*((size, None) for size in args.chunk), *((args.chunk[0], target) for target in args.target_itl_ms)]
    for chunk, target in runs:
        saturated = saturated or args.saturated
        found = [simulate(args, chunk, target, seed, saturated) for seed in range(args.seeds)]
        rows = [mean(load) for load in zip(*found, strict=True)]
        print(f"chunk {chunk}, target {target} ms; median error of the predicted times {rows[0]['error']:.1%}")
        for row in rows:
            show(row)
        saturated = saturated or rows[0]["requests/s"]


if __name__ == "__main__":
    main()
