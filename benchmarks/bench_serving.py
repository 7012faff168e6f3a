"""A mixed load: requests arrive at random while others decode. How long until the first token, and between tokens?

    python -m benchmarks.bench_serving benchmarks/configs/falcon-h1-7b --requests 400 --prompt 512 --output 128

First all requests at once: their number over the time that they take is the saturated rate. Then they arrive as a
Poisson process at shares of that rate. Weights are seeded random numbers from config.json alone.

    ... --chunk 4096,2048,1024,512,256 --target-itl-ms 15 --name serving-chunks && python -m benchmarks.plot_results

Several chunk sizes, and targets of the time between tokens (with chunks of the first size at most), run one after the
other at the rates that the first one has.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.common import environment, free, save, settle
from hybridrt import LLM, SamplingParams
from hybridrt.base.dtypes import DTYPES
from hybridrt.engine.core.engine import Engine

LEAST_CONTEXT = 2048  # tokens of max_model_len, as deployments have: graphs of prompts are no larger than it


class Clock(Protocol):
    """What `serve` needs of the module `time`."""

    def perf_counter(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class Work:
    """One request. `arrival` is in seconds since the start of the run."""

    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0


@dataclass
class Timing:
    """When a request was due and when the host saw its tokens, in seconds since the start of the run."""

    arrival: float
    tokens: list[float] = field(default_factory=list)

    def saw(self, count: int, now: float) -> None:
        """`count` tokens came now."""
        self.tokens += [now] * count

    @property
    def first(self) -> float:
        """Seconds from arrival to the first token."""
        return self.tokens[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:])]


def make_work(args: argparse.Namespace, vocab: int) -> list[Work]:
    """Requests whose lengths are uniform between half and one and a half times the mean asked for."""
    draw = random.Random(args.seed)

    def around(mean: int) -> int:
        return max(draw.randint(mean // 2, mean + mean // 2), 1)

    def params(seed: int) -> SamplingParams:
        tokens = around(args.output)
        return SamplingParams(max_tokens=tokens, temperature=args.temperature, ignore_eos=True, seed=seed)

    prompts = [[draw.randrange(3, vocab) for _ in range(around(args.prompt))] for _ in range(args.requests)]
    return [Work(prompt, params(i)) for i, prompt in enumerate(prompts)]


def arriving(work: Sequence[Work], rate: float, seed: int) -> list[Work]:
    """The same requests as a Poisson process of `rate` requests a second."""
    draw, now, found = random.Random(seed), 0.0, []
    for item in work:
        now += draw.expovariate(rate)
        found.append(Work(item.prompt, item.params, now))
    return found


def serve(engine: Engine, work: Sequence[Work], clock: Clock = time) -> tuple[list[Timing], float]:
    """Runs requests as they arrive; returns their timings and the seconds until the last one ended."""
    timings, due = [Timing(item.arrival) for item in work], 0
    start = clock.perf_counter()
    while due < len(work) or engine.has_unfinished():
        now = clock.perf_counter() - start
        while due < len(work) and work[due].arrival <= now:
            engine.add_request(work[due].prompt, work[due].params, str(due))
            due += 1
        if not engine.has_unfinished():
            clock.sleep(max(work[due].arrival - now, 0.0))
            continue
        wait = min([engine.spare_seconds(), *(item.arrival - now for item in work[due : due + 1])])
        if wait > 0:
            clock.sleep(wait)
            continue
        deltas, seen = engine.step(), clock.perf_counter() - start
        for delta in deltas:
            timings[int(delta.request_id)].saw(len(delta.token_ids), seen)
    return timings, clock.perf_counter() - start


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that `share` hundredths of the values do not exceed."""
    ranked = sorted(values)
    return ranked[min(-(-len(ranked) * share // 100), len(ranked)) - 1]


def summary(load: str, timings: Sequence[Timing], seconds: float) -> dict[str, Any]:
    """One row: rates, and milliseconds to the first and between tokens."""
    first, gaps = [t.first for t in timings], [gap for t in timings for gap in t.gaps] or [0.0]
    row: dict[str, Any] = {"load": load, "requests/s": len(timings) / seconds}
    row["tok/s"] = sum(len(t.tokens) for t in timings) / seconds
    for name, values in (("first token", first), ("between tokens", gaps)):
        for share in (50, 99):
            row[f"{name} p{share} ms"] = percentile(values, share) * 1e3
    return row


def show(row: dict[str, Any]) -> None:
    print(f"{row['load']:>10} {row['requests/s']:9.2f} req/s {row['tok/s']:9.0f} tok/s   first token p50 "
          f"{row['first token p50 ms']:8.1f} p99 {row['first token p99 ms']:8.1f} ms   between tokens p50 "
          f"{row['between tokens p50 ms']:7.2f} p99 {row['between tokens p99 ms']:7.2f} ms", flush=True)  # fmt: skip


def measure(
    engine: Engine, args: argparse.Namespace, saturated: float | None = None, clock: Clock = time
) -> list[dict[str, Any]]:
    """
    Args:
        saturated: requests a second, of which loads are shares; None: what this run finds.
    """
    work = make_work(args, engine.intake.limits.vocab_size)
    serve(engine, work[: max(len(work) // 10, 1)], clock)
    rows = [summary("saturated", *serve(engine, work, clock))]
    show(rows[0])
    for share in args.shares:
        rate = (saturated or rows[0]["requests/s"]) * share
        rows.append(summary(f"{share:.0%}", *serve(engine, arriving(work, rate, args.seed), clock)))
        show(rows[-1])
    return rows


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def targets(text: str) -> list[float | str]:
    return [target if target == "auto" else float(target) for target in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with a config.json; weights are random")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512, help="mean prompt length in tokens")
    parser.add_argument("--output", type=int, default=128, help="mean output length in tokens")
    parser.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",") if x], default=[0.5, 0.8])
    parser.add_argument("--max-running", type=int, default=128, help="requests that decode together")
    parser.add_argument("--chunk", type=sizes, default=[2048], help="tokens of a step; several sizes: a run of each")
    parser.add_argument(
        "--target-itl-ms", type=targets, default=[], help="time between tokens, or auto; of several, a run of each"
    )
    parser.add_argument("--state-dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--state-mode", default="auto", choices=["auto", "classic", "replay"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


def main() -> None:
    args, rows = parse(), list[dict[str, Any]]()
    for chunk, target in [
        *((size, None) for size in args.chunk),
        *((args.chunk[0], each) for each in args.target_itl_ms),
    ]:
        llm = LLM(
            args.model, load_format="dummy", device=args.device, max_running_requests=args.max_running,
            max_model_len=max((args.prompt + args.output) * 3 // 2 + 2, LEAST_CONTEXT),
            chunked_prefill_size=chunk, target_itl_ms=target,
            mamba_ssm_dtype=args.state_dtype, state_mode=args.state_mode, prefix_cache=False,
        )  # fmt: skip
        print(f"chunk {chunk}, target {target} ms; {llm.plan.summary()}" if not rows else f"chunk {chunk}, {target} ms")
        settle()
        found = measure(llm.engine, args, rows[0]["requests/s"] if rows else None)
        if (error := llm.engine.counters().step_cost_error) is not None:
            print(f"median error of the predicted times of steps: {error:.1%}")
        rows += [{"chunk": chunk, "target_itl_ms": target} | row for row in found]
        llm.close()
        del llm
        free()
    print(environment())
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
