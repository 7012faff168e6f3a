"""bench_serving in simulated time, without a model or a GPU: what sizes of chunks and targets would give.

    python -m benchmarks.simulate_serving --chunk 4096,1024,512,256 --target-itl-ms 10,15,20 --seeds 4
    python -m benchmarks.simulate_serving --loads long very-long shared --target-itl-ms auto

With `--loads` it plays loads of benchmarks.traffic_loads by name, with a prefix cache.

Engine and scheduler are the real ones. The executor computes nothing; a step takes as long as one of Falcon-H1-7B takes
on an H200, by `StepTimes`, with normal noise. A seed's run takes seconds and comes out the same each time. Each row is
the mean over seeds; rates of arrival are shares of `--saturated`, or of what the first run finds.
"""

import argparse
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks import traffic_loads
from benchmarks.bench_policy import NUM_PAGES, PAGE_SIZE, NoMasks, SimulatedExecutor
from benchmarks.bench_serving import measure, show, sizes, targets
from hybridrt.base.engine_config import EngineConfig
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.kernels.core.records import SAVES_PER_PROMPT
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.runtime.replay.graph_runner import buckets
from hybridrt.runtime.step.pack_padded import DECODE_ROWS, PROMPT_TOKENS, Bucket, StateSaves, make_buckets
from hybridrt.runtime.step.plan import StepHandle, StepPlan, StepResult

_DECODE_GRAPHS = buckets(1024)
CLOCKS = ("request.sample_request", "cache.prefix_store")  # modules that read a clock
TILE = 128
CACHED_STATES, OTHER = 512, 24  # states in the cache, and tokens of the texts that fill it first
WARM_UP_TOKENS = 40 * (512 + 300) + CACHED_STATES * OTHER
MAX_LEN = 2**17  # tokens of a request
DECODE = ((1, 4.1), (8, 4.8), (32, 5.8), (128, 9.7), (256, 16.6), (1024, 58.0))  # rows and milliseconds
MIN_STEP, BASE_CONTEXT, KV = 3.5, 1024, 1.13e-5
EAGER, EAGER_TOKEN = 6.96, 0.02316
# Graphs of prompts by all tokens that they have room for, in full tiles of TILE, and milliseconds: medians of the loads
# "shared" and "long" in a server, without attention after earlier tokens. Between 1,152 and 1,664 tokens the down
# projection begins a second round of the multiprocessors. The last point was not measured: within a round.
GRAPHS = ((256, 8.4), (384, 11.6), (640, 18.2), (896, 23.2), (1152, 27.2), (1664, 42.0), (1792, 44.0), (2304, 54.5))
EMPTY, ROW = 0.01, 0.011  # milliseconds less for each token that the last tile lacks, and more for each decode row
# Attention of chunks of so many tokens, in milliseconds for each 1,000 tokens of context: 44 times what a layer took
# after 28,672 tokens (8,192: after 24,000), with the copies of keys. Fewer tokens were not measured.
DEPTHS = ((512, 0.46), (1024, 0.73), (1536, 0.84), (2048, 1.14), (3072, 1.63), (4096, 2.04), (8192, 4.12))
# The host launches a step without graphs in 68 ms next to a server's threads (46 where nothing else runs), in 24 more
# when it streams to MANY_STREAMS clients. Older entries of the log had 30 (--launch-ms 30,0).
HOST, HOST_STREAMS, MANY_STREAMS, HOST_SAVE = 68.0, 24.0, 40, 57.6
WAY, WAY_TOKEN = 1.95, 0.0026


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step. Fitted to measured decode steps and steps of few prompt tokens, to attention of chunks
    deep in a context, and to the loads "shared", "long" and "very-long" as a server on an H200 answered them.

    Attributes:
        noise: standard deviation of the logarithm of a step's time.
    """

    buckets: Sequence[Bucket]
    noise: float = 0.015

    def device(self, plan: StepPlan) -> tuple[float, bool]:
        """Of a step, and whether a graph runs it."""
        rows, tokens = len(plan.decode), sum(len(row.tokens) for row in plan.extend)
        context = KV * int(plan.decode.computed.sum())
        if not tokens:
            size = next(size for size in _DECODE_GRAPHS if size >= rows)  # with BASE_CONTEXT tokens a row
            alone = _between(size, DECODE) - KV * BASE_CONTEXT * rows
            return max(alone + context, MIN_STEP), True
        fits = (bucket for bucket in self.buckets if bucket.holds(plan, StateSaves.AT_CHUNKS))
        bucket = next((bucket for bucket in fits if bucket.enters(plan)), None)
        attention = sum([_attention(len(row.tokens), row.computed) for row in plan.extend])
        if bucket is None:
            return EAGER + EAGER_TOKEN * tokens + 0.028 * rows + attention + context, False
        return self._of_graph(bucket, rows) + attention + context, True

    @staticmethod
    def _of_graph(bucket: Bucket, rows: int) -> float:
        if not bucket.decode_rows:
            return max(2 + 0.022 * bucket.tokens, 6.2)
        tiles = -(-sum(bucket) // TILE) * TILE  # products go in tiles of tokens, decode rows included
        return _between(tiles, GRAPHS) - EMPTY * (tiles - sum(bucket)) + ROW * rows

    def host(self, plan: StepPlan, graph: bool) -> float:
        """Of the launch."""
        if graph:
            return 1.4 if plan.extend else 0.7
        streams = HOST_STREAMS * min(len(plan.decode) / MANY_STREAMS, 1.0)
        saves = max((len(row.saves) for row in plan.extend), default=0)
        return HOST + streams + HOST_SAVE * max(saves - SAVES_PER_PROMPT, 0)

    @staticmethod
    def way(tokens: int) -> float:
        """Seconds of a prompt from a client to the engine."""
        return (WAY + WAY_TOKEN * tokens) / 1e3


def _between(size: int, points: Sequence[tuple[int, float]]) -> float:
    """`size` on the line through the measured points around it, or through the last two."""
    at = min(max(bisect_left([x for x, _ in points], size), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1 : at + 1]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def _attention(tokens: int, computed: int) -> float:
    """Of a chunk of `tokens` tokens after `computed` ones."""
    return _between(max(tokens, DEPTHS[0][0]), DEPTHS) * (computed + tokens / 2) / 1e3


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
    """Runs one step after the other, by the clock of the host."""

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


def engine(
    device: SimulatedDevice,
    times: StepTimes,
    chunk: int,
    target_ms: float | str | None,
    rows: int,
    cached_states: int = 0,
) -> Engine:
    """Its policy has the device's clock. It has a prefix cache if there are `cached_states`."""
    demands, cached = [PageDemand(PAGE_SIZE)], cached_states > 0
    pools = CacheCoordinator(rows, rows + cached_states, [NUM_PAGES], demands, prefix_cache=cached)
    config = EngineConfig("simulated", target_itl_ms=target_ms)  # type: ignore[arg-type]
    if policy := TrafficPolicy.from_config(config, torch.device("cuda"), times.buckets):
        policy.clock = device.monotonic
    return Engine(device, pools, EngineLimits(traffic_loads.VOCAB, MAX_LEN, chunk), policy=policy)


def run(
    items: Sequence[traffic_loads.Item],
    target_ms: float | str | None,
    watch: Callable[[Engine, int], None] = lambda engine, i: None,
    seed: int = 0,
) -> tuple[list[traffic_loads.Seen], float, Engine]:
    """Plays a load; `watch` is called before each item is sent. Returns what clients saw, the seconds, the engine. Its
    prefix cache is full of other texts, as in a server after some minutes."""
    times = StepTimes(sorted(make_buckets(DECODE_ROWS, PROMPT_TOKENS), key=sum))
    device = SimulatedDevice(times, seed)
    clock = (mock.patch(f"hybridrt.engine.{name}.time", device) for name in CLOCKS)
    with next(clock), next(clock):
        served = engine(device, times, 8192, target_ms, 256, CACHED_STATES)
        draw = random.Random(seed + 97)
        others = [traffic_loads.Item([traffic_loads.tokens(draw, OTHER)], 1) for _ in range(CACHED_STATES)]
        for warm_up in (
            others, traffic_loads.plain(seed + 99, 40, 512, 1e9), traffic_loads.plain(seed + 98, 40, 300, 10.0)
        ):  # fmt: skip
            traffic_loads.Player(served, warm_up, device).play()
        player = traffic_loads.Player(served, items, device, times.way, watch)
        return player.seen, player.play(), served


def play(load: str, target_ms: float | str | None, seed: int = 0) -> dict[str, float]:
    """Figures of one of LOADS; "computed": tokens of prompts."""
    seen, seconds, served = run(traffic_loads.LOADS[load](seed), target_ms, seed=seed)
    return traffic_loads.figures(seen, seconds) | {"computed": float(served.counters().prompt_tokens - WARM_UP_TOKENS)}


def simulate(
    args: argparse.Namespace, chunk: int, target_ms: float | str | None, seed: int, saturated: float | None
) -> list[dict[str, Any]]:
    """Rows of `bench_serving.measure`, with the median error of the predicted times."""
    times = StepTimes(sorted(make_buckets(args.decode_rows, args.prompt_tokens), key=sum))
    device = SimulatedDevice(times, seed)
    args = argparse.Namespace(**vars(args), seed=seed, temperature=0.0)
    simulated = engine(device, times, chunk, target_ms, args.max_running)
    with mock.patch(f"hybridrt.engine.{CLOCKS[0]}.time", device), mock.patch("benchmarks.bench_serving.show"):
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
    parser.add_argument("--launch-ms", type=lambda t: [float(x) for x in t.split(",")], help="HOST,HOST_STREAMS")
    parser.add_argument(
        "--loads", nargs="+", choices=tuple(traffic_loads.LOADS), default=[], help="only these, by name"
    )
    return parser.parse_args(arguments)


def show_load(load: str, target_ms: float | str | None, seeds: int) -> None:
    found = [play(load, target_ms, seed) for seed in range(seeds)]
    figures = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    print(f"{load}, target {target_ms}: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))


def main() -> None:
    global HOST, HOST_STREAMS
    args, saturated = parse(), None
    if args.launch_ms:
        HOST, HOST_STREAMS = args.launch_ms
    for load in args.loads:
        for target in (None, *args.target_itl_ms):
            show_load(load, target, args.seeds)
    if args.loads:
        return
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
