"""Loads of a server by name, and limits that the traffic policy keeps with them.

Prompts are random tokens; requests arrive by a Poisson process of their rate. Mixes: 80% of 512 tokens, 15% of 4,096
and 5% of 32,768. Each limit is in milliseconds or compares the policy with first come, first served.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.bench_serving import Clock, percentile
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.bench.suites import chosen
from hybridrt.bench.workload import WorkloadConfig, make_work
from hybridrt.engine.core.engine import Engine

VOCAB = 130_000
MIX = ((0.80, 512, 128, "short"), (0.95, 4096, 256, "middle"), (1.0, 32768, 256, "long"))
MIX_RATE = 0.8 * 11.45  # 80% of what an H200 serves of Falcon-H1-7B
RATE = 25.0  # tokens a second that a reader needs
GRACE = 0.25  # seconds that a reader's buffer holds


@dataclass
class Item:
    """One request.

    Attributes:
        prompt: parts: tokens, or the number of an item whose answer is quoted.
        arrival: seconds since the start, or since the end of item `after`.
    """

    prompt: list[list[int] | int]
    output: int
    arrival: float = 0.0
    after: int | None = None
    tag: str = ""
    client: str = ""


@dataclass
class Seen:
    """What a client saw of an item."""

    tag: str
    due: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.times[0] - self.due


class Player:
    """Sends the items of a load to an engine, by the engine's clock.

    Args:
        way: seconds that a prompt of so many tokens needs to the engine; clients wait for that, too.
        watch: called before each item is sent.
    """

    def __init__(
        self,
        engine: Engine,
        items: Sequence[Item],
        clock: Clock,
        way: Callable[[int], float] = lambda tokens: 0.0,
        watch: Callable[[Engine, int], None] = lambda engine, i: None,
    ) -> None:
        self._engine, self._items, self._clock, self._way, self._watch = engine, items, clock, way, watch
        self.seen = [Seen(item.tag) for item in items]
        self._due = sorted((item.arrival, i) for i, item in enumerate(items) if item.after is None)
        self._next = dict[int, list[int]]()
        for i, item in enumerate(items):
            if item.after is not None:
                self._next.setdefault(item.after, []).append(i)

    def play(self) -> float:
        """Returns the seconds until the last item has ended."""
        engine, clock, start, left = self._engine, self._clock, self._clock.perf_counter(), len(self._items)
        while left:
            now = clock.perf_counter() - start
            while self._due and self._due[0][0] <= now:
                self._send(*self._due.pop(0))
            if not engine.has_unfinished():
                clock.sleep(max(self._due[0][0] - now, 0.0))
                continue
            wait = min([engine.spare_seconds(), *(due - now for due, _ in self._due[:1])])
            if wait > 0:
                clock.sleep(wait)
                continue
            left -= self._step(start)
        return clock.perf_counter() - start

    def _send(self, due: float, i: int) -> None:
        item, seen = self._items[i], self.seen[i]
        parts = [self.seen[part].tokens if isinstance(part, int) else part for part in item.prompt]
        prompt = [token for part in parts for token in part]
        seen.due = due - self._way(len(prompt))
        params = SamplingParams(max_tokens=item.output, temperature=0.0, ignore_eos=True, seed=i)
        self._watch(self._engine, i)
        self._engine.submit(self._engine.prepare(prompt, params), str(i), client=item.client)

    def _step(self, start: float) -> int:
        """Returns how many items have ended."""
        deltas, ended = self._engine.step(), 0
        now = self._clock.perf_counter() - start
        for delta in deltas:
            i = int(delta.request_id)
            self.seen[i].times += [now] * len(delta.token_ids)
            self.seen[i].tokens += delta.token_ids
            if delta.finish_reason is not None:
                ended += 1
                self._due += [(now + self._items[k].arrival, k) for k in self._next.get(i, ())]
                self._due.sort()
        return ended


def figures(seen: Sequence[Seen], seconds: float) -> dict[str, float]:
    """Milliseconds to first tokens and between tokens; also to the first tokens of each tag."""
    firsts = [each.first * 1e3 for each in seen]
    gaps = [(later - time) * 1e3 for each in seen for time, later in zip(each.times, each.times[1:])]
    late = [any(t > each.times[0] + GRACE + k / RATE + 1e-9 for k, t in enumerate(each.times)) for each in seen]
    found = {
        "seconds": seconds, "tokens/s": sum(len(each.times) for each in seen) / seconds,
        "first mean": statistics.fmean(firsts), "between p99": percentile(gaps, 99), "readers that wait": sum(late),
    }  # fmt: skip
    for tag in {"", *(each.tag for each in seen)}:
        own = [each.first * 1e3 for each in seen if tag in ("", each.tag)]
        name = f"{tag} first" if tag else "first"
        found |= {f"{name} p{share}": percentile(own, share) for share in (50, 90, 99)} | {f"{name} max": max(own)}
    return found


def tokens(draw: random.Random, count: int) -> list[int]:
    """`draw.randrange(3, VOCAB)` for each, in a tenth of the time: the high bits of 32, drawn again where they are too
    many."""
    found, choices = list[int](), VOCAB - 3
    while missing := count - len(found):
        words = np.frombuffer(draw.getrandbits(32 * missing).to_bytes(4 * missing, "little"), "<u4")
        drawn = words >> (32 - choices.bit_length())
        found += (drawn[drawn < choices] + 3).tolist()
    return found


def _arriving(draw: random.Random, items: list[Item], rate: float) -> list[Item]:
    now = 0.0
    for item in items:
        now += draw.expovariate(rate)
        item.arrival = now
    return items


def plain(seed: int, count: int, prompt: int, rate: float, **more: object) -> list[Item]:
    """The requests of `hybridrt bench serve`, with answers of 128 tokens."""
    config = WorkloadConfig(
        requests=count, prompt_tokens=prompt, output_tokens=128, fixed=True, rate=rate, vocab=VOCAB, seed=seed, **more
    )  # type: ignore[arg-type]
    return [Item([work.prompt], 128, work.arrival) for work in make_work(config)]


def shared(seed: int) -> list[Item]:
    """16 texts of 4,096 tokens, each followed by 256 others; nothing is cached at first."""
    return plain(seed, 120, 256, 8.0, data="shared-prefix", prefixes=16, prefix_tokens=4096)


def saturated(seed: int, clients: int = 256, turns: int = 2) -> list[Item]:
    """Each client sends the next request when the last one has ended."""
    draw = random.Random(seed)
    items = [Item([tokens(draw, 512)], 128) for _ in range(clients * turns)]
    for i in range(clients, len(items)):
        items[i].after = i - clients
    return items


def mix(seed: int, count: int = 300, rate: float = MIX_RATE) -> list[Item]:
    draw, items = random.Random(seed), list[Item]()
    for _ in range(count):
        share = draw.random()
        prompt, output, tag = next(each[1:] for each in MIX if share < each[0])
        items.append(Item([tokens(draw, draw.randint(prompt * 3 // 4, prompt * 5 // 4))], output, tag=tag))
    return _arriving(draw, items, rate)


def suite_mix(seed: int) -> list[Item]:
    """The requests of `hybridrt bench serve --suite mix`, of this seed."""

    def tag(length: int) -> str:
        return next(tag for _, prompt, _, tag in MIX if length <= prompt * 5 // 4)

    work = make_work(chosen("mix", seed)["mix"].workload)
    return [Item([each.prompt], each.max_tokens, each.arrival, tag=tag(len(each.prompt))) for each in work]


def same_text(seed: int) -> list[Item]:
    """Eight users of one new text of 8,192 tokens, 30 ms apart, while four others decode."""
    draw = random.Random(seed + 3)
    base = [Item([tokens(draw, 512)], 400, 0.02 * i, tag="base") for i in range(4)]
    text = tokens(draw, 8192)
    return base + [Item([text, tokens(draw, 128)], 64, 1.0 + 0.03 * i, tag="same") for i in range(8)]


def burst(seed: int) -> list[Item]:
    """40 prompts of 4,096 tokens at once, at second 3 of a stream of short ones."""
    draw = random.Random(seed)
    items = _arriving(draw, [Item([tokens(draw, 512)], 256, tag="base") for _ in range(40)], 5.0)
    items += [Item([tokens(draw, 4096)], 128, 3.0, tag="burst") for _ in range(40)]
    return sorted(items, key=lambda item: item.arrival)


def agents(seed: int, count: int = 16, turns: int = 8) -> list[Item]:
    """Each agent's next prompt has the answers and results of tools before it."""
    draw, items, now = random.Random(seed), list[Item](), 0.0
    tool = tokens(draw, 3000)
    for _ in range(count):
        now += draw.expovariate(3.0)
        before, parts = None, [tool, tokens(draw, 400)]
        for _ in range(turns):
            parts = [*parts, tokens(draw, draw.choice([100, 300, 1500, 6000]))]
            items.append(Item(list(parts), 80, now if before is None else 0.3, before, "agent"))
            before = len(items) - 1
            parts = [*parts, before]
    return items


LOADS: Mapping[str, Callable[[int], list[Item]]] = {
    "10/s": lambda seed: plain(seed, 200, 512, 10.0),
    "20/s": lambda seed: plain(seed, 360, 512, 20.0),
    "30/s": lambda seed: plain(seed, 480, 512, 30.0),
    "saturated": saturated,
    "long": lambda seed: plain(seed, 48, 4352, 4.0),
    "very-long": lambda seed: plain(seed, 12, 32768, 0.6),
    "more-very-long": lambda seed: plain(seed, 36, 32768, 0.6),
    "shared": shared,
    "same-text": same_text,
    "burst": burst,
    "mix": mix,
    "agents": agents,
    "suite-mix": suite_mix,
}


class Limit(NamedTuple):
    """A figure of a load with the policy is at most `most`. `relative`: of the figure without one. `least`: it is at
    least that instead."""

    load: str
    figure: str
    most: float
    relative: bool = False
    least: bool = False

    def holds(self, found: float, without: float) -> bool:
        value = found / without if self.relative else found
        return value >= self.most if self.least else value <= self.most


LIMITS = (
    Limit("10/s", "first p50", 26), Limit("10/s", "first p99", 1.25, True), Limit("10/s", "between p99", 18.5),
    Limit("30/s", "first p50", 1.0, True), Limit("30/s", "first p99", 1.3, True), Limit("30/s", "between p99", 25),
    Limit("30/s", "readers that wait", 0),
    Limit("saturated", "tokens/s", 0.97, True, least=True), Limit("saturated", "between p99", 100),
    Limit("long", "first mean", 1.45, True), Limit("long", "first p99", 1.3, True), Limit("long", "between p99", 75),
    Limit("very-long", "first mean", 1.25, True), Limit("very-long", "first p99", 1.2, True),
    Limit("very-long", "between p99", 100), Limit("very-long", "seconds", 1.03, True),
    Limit("more-very-long", "first mean", 1.3, True), Limit("more-very-long", "first max", 1.25, True),
    Limit("more-very-long", "between p99", 100),
    Limit("shared", "first p90", 420), Limit("shared", "first p99", 520), Limit("shared", "between p99", 75),
    Limit("same-text", "computed", 12_500), Limit("same-text", "same first max", 0.8, True),
    Limit("burst", "base first p99", 1200), Limit("burst", "first max", 1.25, True), Limit("burst", "between p99", 100),
    Limit("mix", "short first p99", 800), Limit("mix", "long first max", 1.5, True),
    Limit("mix", "tokens/s", 0.97, True, least=True), Limit("mix", "between p99", 100),
    Limit("agents", "first mean", 1.0, True), Limit("agents", "between p99", 90),
    Limit("suite-mix", "first max", 1.5, True), Limit("suite-mix", "short first p99", 0.25, True),
    Limit("suite-mix", "between p99", 100),
)  # fmt: skip
