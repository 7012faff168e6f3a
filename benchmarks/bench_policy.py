"""Hit rates of the prefix cache with few state slots, without a model: each trace, seed, load and number of slots.

    python -m benchmarks.bench_policy --seeds 3

The engine, its scheduler and its cache are the real ones. The executor computes nothing, and a step takes as long on a
simulated clock as it has tokens: so a run takes seconds. Beside each hit rate stands what a clairvoyant cache could have had
in the same run (benchmarks.prefix_bound).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from benchmarks import prefix_bound, traces
from benchmarks.bench_prefix import Player, summary
from benchmarks.traces import TRACES, Shape
from hybridrt.engine.cache_coordinator import CacheCoordinator
from hybridrt.engine.engine import Engine
from hybridrt.engine.limits import EngineLimits
from hybridrt.runtime.step import StepPlan, StepResult

VOCAB = 50_000
TOKEN_SECONDS = 0.004  # of a prompt, where a step of no tokens takes 1


class Answered:
    """A step that has run."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class SimulatedExecutor:
    """Answers with tokens that depend on a request's seed and the output index alone, and counts time.

    Attributes:
        now: seconds that the steps so far have taken.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._seeds = dict[int, int]()

    def launch(self, plan: StepPlan) -> Answered:
        self._seeds |= {admission.row: admission.seed for admission in plan.admissions}
        self.now += 1 + TOKEN_SECONDS * sum(len(row.tokens) for row in plan.extend)
        sampled = [*plan.decode, *(row for row in plan.extend if row.sample)]
        tokens = [[3 + hash((self._seeds[row.row], row.output_index)) % (VOCAB - 3)] for row in sampled]
        return Answered(StepResult(tokens, [None] * len(tokens)))

    def copied(self, ticket: int) -> bool:
        return True

    def sample(self, masks: Any) -> None:
        raise NotImplementedError("no request of a trace has a grammar")

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def engine_of(args: argparse.Namespace, slots: int) -> tuple[Engine, SimulatedExecutor]:
    executor, longest = SimulatedExecutor(), 10**6
    pages = args.pages
    coordinator = CacheCoordinator(args.rows, slots, pages, args.page_size, prefix_cache=True)
    limits = EngineLimits(VOCAB, longest, args.chunk, frozenset())
    return Engine(executor, coordinator, limits), executor


def measure(case: tuple[argparse.Namespace, str, int, float, int]) -> dict[str, Any]:
    args, trace, seed, load, slots = case
    shape = Shape(args.units, args.turns, args.prompt, args.output, VOCAB, seed)
    items = TRACES[trace](shape)
    if load:
        tokens = sum(item.max_tokens for item in items) / args.rows
        prompts = {}
        for item in items:
            prompts[item.id] = sum(len(p) if isinstance(p, tuple) else 0 for p in item.parts)
        seconds = tokens + TOKEN_SECONDS * sum(prompts.values())
        items = traces.arriving(items, sum(not i.after for i in items) / seconds * load, seed)
    if args.think:
        import random

        draw = random.Random(seed)
        items = [replace(i, delay=draw.expovariate(1 / args.think)) if i.after else i for i in items]
    engine, executor = engine_of(args, slots)
    start = time.perf_counter()
    ran, seconds = Player(engine, items, clock=executor).play()
    took = time.perf_counter() - start
    row = summary("", ran, seconds)
    served = [r.served() for r in ran]
    program = prefix_bound.program(served, args.page_size, slots, args.pages)
    bound = prefix_bound.bound(program, args.rounds)
    hit = row["hit"]
    return {
        "trace": trace,
        "seed": seed,
        "load": load,
        "slots": slots,
        "hit": hit / row["asked"],
        "bound": bound / row["asked"],
        "unlimited": program.unlimited / row["asked"],
        "share": hit / bound if bound else 1.0,
        "took": took,
        "redone": row["redone mean"],
        "redmax": row["redone max"],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=sorted(TRACES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 20], help="times --rows for cached prefixes")
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--output", type=int, default=100)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pages", type=int, default=2**17)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--think", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("-v", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    args = parse()
    cases = [
        (args, t, s, l, args.rows * (1 + k))
        for k in args.slots
        for l in args.loads
        for t in args.traces
        for s in range(args.seeds)
    ]
    with get_context("fork").Pool(2) as pool:
        rows = list(pool.imap(measure, cases))
    for k in args.slots:
        for l in args.loads:
            for t in args.traces:
                some = [r for r in rows if (r["slots"], r["load"], r["trace"]) == (args.rows * (1 + k), l, t)]
                print(
                    f"S=R+{k}R load {l:3.1f} {t:>10}: of bound "
                    + " ".join(f"{r['share']:6.1%}" for r in some)
                    + "  hit "
                    + " ".join(f"{r['hit']:5.1%}" for r in some)
                    + "  bound "
                    + " ".join(f"{r['bound']:5.1%}" for r in some)
                    + "  unl "
                    + " ".join(f"{r['unlimited']:5.1%}" for r in some[:1])
                    + f" redone {some[0]['redone']:.0f} max {some[0]['redmax']}"
                    + f"  {some[0]['took']:.1f}s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
