"""Hit rates of the prefix cache with few state slots, without a model: over traces, loads, numbers of slots and seeds.

    python -m benchmarks.bench_policy --seeds 3

The engine, its scheduler and its prefix cache are the real ones. The executor computes nothing. A simulated clock says
how long a step takes, and how long users think. So a run takes seconds, and comes out the same each time. Beside each
hit rate stands what a clairvoyant cache could have had in the same run (benchmarks.prefix_bound).
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch

from benchmarks import prefix_bound, traces
from benchmarks.bench_prefix import Player, Ran, recomputed
from benchmarks.common import environment, save
from benchmarks.traces import TRACES, Item, Shape
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slab_plan import SlabPlan, plan_slabs
from hybridrt.runtime.step.plan import StepHandle, StepPlan, StepResult

VOCAB, PAGE_SIZE, NUM_PAGES, LONGEST = 50_000, 16, 2**17, 2**20
TOKEN_SECONDS = 0.004  # of a prompt. A step takes a second besides
# Of a model whose page groups and states share memory: attention layers, of which one has no window if others have one;
# bytes of a token in the keys of a layer; tokens in all layers without windows that have the bytes of a state.
ATTENTION_LAYERS, KEY_BYTES, STATE_TOKENS = 6, 1024, 1024


class NoMasks:
    """A handle of a step without grammars."""

    needs_masks = False

    def sample(self, masks: Any) -> None:
        raise NotImplementedError("no request of a trace has a grammar")

    def drop(self) -> None:
        pass


@dataclass(frozen=True)
class Answered(NoMasks):
    """A step that has run."""

    answer: StepResult

    def ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.answer


class SimulatedExecutor:
    """Answers at once, with tokens that depend on a request's seed and the output index alone. It is the clock, too."""

    def __init__(self) -> None:
        self._now = 0.0
        self._seeds = dict[int, int]()

    def launch(self, plan: StepPlan) -> StepHandle:
        self._now += 1 + TOKEN_SECONDS * sum(len(row.tokens) for row in plan.extend)
        return Answered(self._answer(plan))

    def _answer(self, plan: StepPlan) -> StepResult:
        self._seeds |= {admission.row: admission.seed for admission in plan.admissions}
        sampled = list(zip(plan.decode.rows.tolist(), plan.decode.output_indices.tolist()))
        sampled += [(row.row, row.output_index) for row in plan.extend if row.sample]
        tokens = [[3 + hash((self._seeds[row], index)) % (VOCAB - 3)] for row, index in sampled]
        return StepResult(tokens, [None] * len(tokens))

    def drop_last(self) -> None: ...

    def copied(self, ticket: int) -> bool:
        return True

    def monotonic(self) -> float:
        return self._now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        load: arrivals, as a share of the rate at which steps without a cache could serve; 0: all at once.
        rows: requests that run together.
        slots: states for cached prefixes, in addition to one for each row.
        think: mean seconds between an answer and the next turn.
        windows: of the attention layers, by page group; None: no window. A window group has the pages
            that the memory plan gives it: those of running requests, and the window of each state.
        tokens: page groups and states share memory: that of `rows` + `slots` states, and of so many tokens in
            all layers without windows. 0: each has memory of its own, and pages are ample.
    """

    trace: str
    shape: Shape
    load: float
    rows: int
    slots: int
    think: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    tokens: int = 0

    def items(self) -> list[Item]:
        items, draw = TRACES[self.trace](self.shape), random.Random(self.shape.seed)
        if self.load:
            prompts = sum(len(part) for item in items for part in item.parts if isinstance(part, tuple))
            seconds = sum(item.max_tokens for item in items) / self.rows + TOKEN_SECONDS * prompts
            first = sum(not item.after for item in items)
            items = traces.arriving(items, self.load * first / seconds, self.shape.seed)
        if self.think:
            items = [replace(i, delay=draw.expovariate(1 / self.think)) if i.after else i for i in items]
        return items

    def play(self, chunk: int = 2048) -> list[Ran]:
        executor = SimulatedExecutor()
        demands = [PageDemand(PAGE_SIZE, window, chunk) for window in self.windows]
        pages = [
            NUM_PAGES if demand.window is None else demand.pool(self.rows, LONGEST) + self.slots * demand.kept
            for demand in demands
        ]
        slabs = self.slabs() if self.tokens else None
        slots = self.rows + self.slots if slabs is None else slabs.num_slots
        pools = CacheCoordinator(self.rows, slots, pages, demands, prefix_cache=True, slabs=slabs)
        engine = Engine(executor, pools, EngineLimits(VOCAB, LONGEST, chunk))
        return Player(engine, self.items(), clock=executor).play()[0]

    def slabs(self) -> SlabPlan:
        """The memory that `tokens` asks for."""
        others = max(len(self.windows) - 1, 1)
        parts = [(ATTENTION_LAYERS - 1) * i // others for i in range(others + 1)]
        layers = [1, *[end - start for start, end in pairwise(parts)]]
        layers = layers if len(self.windows) > 1 else [ATTENTION_LAYERS]
        cell, token = PAGE_SIZE * KEY_BYTES, 2 * ATTENTION_LAYERS * KEY_BYTES
        plan = plan_slabs(
            (self.tokens + (self.rows + self.slots) * STATE_TOKENS) * token, [2 * n * cell for n in layers],
            [cell] * len(layers), own_pages=0, page_size=PAGE_SIZE, slot_bytes=STATE_TOKENS * token,
        )  # fmt: skip
        assert plan is not None
        return plan


def measure(case: Case, rounds: int = prefix_bound.ROUNDS) -> dict[str, Any]:
    """Hit rate of a run and its bounds, each as a share of the prompts' tokens; tokens computed again."""
    ran = case.play()
    program = prefix_bound.program([r.served() for r in ran], PAGE_SIZE, case.rows + case.slots, NUM_PAGES)
    asked, redone = sum(len(r.prompt) for r in ran), recomputed(ran)
    hit, bound = sum(r.metrics.cached_tokens for r in ran) / asked, prefix_bound.bound(program, rounds) / asked
    return {
        "trace": case.trace, "seed": case.shape.seed, "load": case.load, "rows": case.rows, "slots": case.slots,
        "think": case.think, "windows": case.windows, "tokens": case.tokens, "hit rate": hit, "bound": bound,
        "unlimited": program.unlimited / asked,
        "of bound": hit / bound if bound else 1.0, "redone mean": sum(redone) / len(redone), "redone max": max(redone),
    }  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> None:
    """One line: the seeds of one trace, load and number of slots."""
    first, columns = rows[0], ("of bound", "hit rate", "bound")
    line = f"S = R + {first['slots']:3} load {first['load']:.1f} {first['trace']:>10}"
    print(line, *(f"  {name} " + " ".join(f"{row[name]:6.1%}" for row in rows) for name in columns), flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=sorted(TRACES), choices=sorted(TRACES))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, from seed 0 on")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.0, 0.6], help="0: everybody comes at once")
    parser.add_argument("--rows", type=int, default=4, help="R: requests that run together")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 20], help="for cached prefixes, in multiples of R")
    parser.add_argument("--units", type=int, default=24, help="conversations, agents, users or problems")
    parser.add_argument("--turns", type=int, default=8, help="of each, or levels of a tree")
    parser.add_argument("--prompt", type=int, default=400, help="mean new tokens of a turn")
    parser.add_argument("--output", type=int, default=100, help="mean answer of a turn")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds before a turn; a step takes one")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[0], help="tokens that the layers of each page group see; 0: all"
    )
    parser.add_argument(
        "--tokens", type=int, default=0,
        help="page groups and states share memory: so many tokens in all layers without windows, and the states",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=prefix_bound.ROUNDS, help="descent of the bound")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args(arguments)


def main() -> None:
    args, found = parse(), list[dict[str, Any]]()
    torch.set_num_threads(1)
    for slots, load, trace in product(args.slots, args.loads, args.traces):
        shapes = [Shape(args.units, args.turns, args.prompt, args.output, VOCAB, seed) for seed in range(args.seeds)]
        windows = tuple([window or None for window in args.windows])
        cases = [
            Case(trace, shape, load, args.rows, slots * args.rows, args.think, windows, args.tokens) for shape in shapes
        ]
        rows = [measure(case, args.rounds) for case in cases]
        show(rows)
        found += rows
    print(environment())
    if args.name:
        print(save(args.name, found))


if __name__ == "__main__":
    main()
