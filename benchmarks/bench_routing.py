"""Hit rates and queues of several replicas by how requests are placed on them, without a model.

    python -m benchmarks.bench_routing --seeds 3

The engines, their schedulers and their prefix caches are the real ones; the clock and the executor are those of
benchmarks.bench_policy. Each run is compared with one engine that has the memory and the rows of all replicas. `queue`
is the longest queue (requests that a replica has not answered yet) divided by the mean of all replicas', both averaged
over the arrivals of requests.
"""

import argparse
import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.bench_policy import LONGEST, NUM_PAGES, PAGE_SIZE, VOCAB, Case, SimulatedExecutor
from benchmarks.common import environment, save
from benchmarks.traces import TRACES, Item, Shape
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.fleet.placement import Placed, Placement, Replica
from hybridrt.fleet.prefix_mirror import CacheLayout, PrefixMirror, names_of
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.sampling_params import SamplingParams

CHUNK = 2048
Choose = Callable[[Item, Sequence[int]], Placed]


class SimulatedReplica:
    """A real engine over a simulated device, with the mirror that its events make."""

    def __init__(self, name: str, rows: int, slots: int, pages: int) -> None:
        self.clock = SimulatedExecutor()
        demands = [PageDemand(PAGE_SIZE, None, CHUNK)]
        pools = CacheCoordinator(rows, rows + slots, [pages], demands, prefix_cache=True)
        self.engine = Engine(self.clock, pools, EngineLimits(VOCAB, LONGEST, CHUNK))
        self.events = self.engine.cache_events(2**20)
        self.placed = Replica(name, PrefixMirror(CacheLayout(PAGE_SIZE, True)))

    def update(self) -> None:
        assert self.placed.mirror is not None
        self.placed.mirror.update(self.events.read())


class Fleet:
    """Plays a trace on replicas. A replica's clock runs ahead of the others' by one step at most."""

    def __init__(self, replicas: Sequence[SimulatedReplica], items: Sequence[Item], policy: str, seed: int = 0) -> None:
        self.replicas, self._items = {r.placed.name: r for r in replicas}, items
        self._placement, self._draw, self._turn = Placement(), random.Random(seed), 0
        for replica in replicas:
            self._placement.add(replica.placed)
        self._policy = policy
        self._open = {item.id: set(item.after) for item in items}
        self._followers: dict[str, list[int]] = {}
        for number, item in enumerate(items):
            for name in item.after:
                self._followers.setdefault(name, []).append(number)
        self._due = [(item.delay, i) for i, item in enumerate(items) if not item.after]
        heapq.heapify(self._due)
        self._answers: dict[str, list[int]] = {}
        self._running: dict[str, Placed] = {}
        self.asked = self.hit = 0
        self.queues: list[list[int]] = []

    def play(self) -> None:
        while self._due or self._running:
            busy = [r for r in self.replicas.values() if r.engine.has_unfinished()]
            now = min((r.clock.monotonic() for r in busy), default=math.inf)
            if self._due and self._due[0][0] <= now:
                due, number = heapq.heappop(self._due)
                self._send(number, due)
            else:
                self._step(min(busy, key=lambda r: r.clock.monotonic()))

    def _send(self, number: int, now: float) -> None:
        item = self._items[number]
        prompt = item.prompt(self._answers)
        placed = self._place(item, prompt)
        self.asked += len(prompt)
        replica = self.replicas[placed.replica.name]
        if not replica.engine.has_unfinished():
            replica.clock.sleep(max(now - replica.clock.monotonic(), 0.0))
        params = SamplingParams(
            max_tokens=item.max_tokens, temperature=1.0, ignore_eos=True, seed=number, cache_salt=item.salt
        )
        replica.engine.add_request(prompt, params, item.id)
        self._running[item.id], self._answers[item.id] = placed, []
        self.queues.append([r.placed.requests for r in self.replicas.values()])

    def _place(self, item: Item, prompt: Sequence[int]) -> Placed:
        names = names_of(prompt, CacheKey(item.salt or ""))
        every = list(self.replicas)
        self._turn += 1
        if self._policy == "random":
            return self._placement.place(names, among={self._draw.choice(every)})
        if self._policy == "round robin":
            return self._placement.place(names, among={every[self._turn % len(every)]})
        return self._placement.place(names)

    def _step(self, replica: SimulatedReplica) -> None:
        for delta in replica.engine.step():
            assert delta.error is None, delta.error
            self._answers[delta.request_id] += delta.token_ids
            if delta.token_ids:
                self._running[delta.request_id].computed()
            if delta.metrics is not None:
                self._end(delta.request_id, delta.metrics.cached_tokens, replica.clock.monotonic())
        replica.update()

    def _end(self, name: str, cached: int, now: float) -> None:
        self._running.pop(name).ended()
        self.hit += cached
        for number in self._followers.get(name, ()):
            item = self._items[number]
            self._open[item.id].discard(name)
            if not self._open[item.id]:
                heapq.heappush(self._due, (now + item.delay, number))

    @property
    def longest_queue(self) -> float:
        """The longest queue, compared with the mean one."""
        means = sum(sum(queue) / len(queue) for queue in self.queues)
        return sum(max(queue) for queue in self.queues) / means


def measure(case: Case, count: int, policies: Sequence[str], pages: int = NUM_PAGES // 8) -> list[dict[str, Any]]:
    """One row a policy. `case` says rows and slots of one replica; its load is that of one replica."""
    items, rows = case.items(), []
    big = Fleet([SimulatedReplica("big", case.rows * count, case.slots * count, pages * count)], items, "prefix")
    big.play()
    for policy in policies:
        fleet = Fleet([SimulatedReplica(str(i), case.rows, case.slots, pages) for i in range(count)], items, policy)
        fleet.play()
        rows.append({
            "trace": case.trace, "seed": case.shape.seed, "policy": policy, "replicas": count, "rows": case.rows,
            "slots": case.slots, "load": case.load, "think": case.think, "hit rate": fleet.hit / fleet.asked,
            "one cache": big.hit / big.asked, "of one cache": fleet.hit / big.hit, "queue": fleet.longest_queue,
        })  # fmt: skip
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['trace']:>10} seed {row['seed']} {row['policy']:>12}: hit {row['hit rate']:6.1%}, "
        f"{row['of one cache']:6.1%} of one cache's {row['one cache']:6.1%}; longest queue {row['queue']:.2f} x mean",
        flush=True,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=["chat", "agents", "shared"], choices=sorted(TRACES))
    parser.add_argument("--policies", nargs="+", default=["prefix", "round robin", "random"])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, from seed 0 on")
    parser.add_argument("--rows", type=int, default=16, help="requests that run together on a replica")
    parser.add_argument("--slots", type=int, default=60, help="states for cached prefixes of a replica")
    parser.add_argument("--units", type=int, default=192, help="conversations, agents or users")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--output", type=int, default=100)
    parser.add_argument("--load", type=float, default=7.5, help="in units of what one replica could serve; 0: at once")
    parser.add_argument("--think", type=float, default=20.0, help="mean seconds before a turn; a step takes one")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args(arguments)


def main() -> None:
    args, found = parse(), list[dict[str, Any]]()
    torch.set_num_threads(1)
    for trace in args.traces:
        for seed in range(args.seeds):
            shape = Shape(args.units, args.turns, args.prompt, args.output, VOCAB, seed)
            case = Case(trace, shape, args.load, args.rows, args.slots, args.think)
            for row in measure(case, args.replicas, args.policies):
                show(row)
                found.append(row)
    print(environment())
    if args.name:
        print(save(args.name, found))


if __name__ == "__main__":
    main()
