"""No prompt starves: first tokens of very many requests in simulated time, compared with a bound.

    python -m benchmarks.starvation --requests 1000000 --load 0.9 --seed 1
    python -m benchmarks.starvation --requests 100000 --load 2 --timeout 30

Prompts are those of the mix of benchmarks.traffic_loads, answers have a few tokens, and there is no prefix cache. A
request's first token must come within its own work, twice the work that was there when it came, and a second. With
`--timeout` requests are refused as the server refuses them, and those that are taken must end in time. Exit status 1:
a request came too late.
"""

import argparse
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import numpy as np

from benchmarks import simulate_serving
from benchmarks.simulate_serving import CLOCKS, SimulatedDevice, StepTimes
from benchmarks.traffic_loads import MIX, VOCAB, Player, plain
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.core.step_cost import PromptWork
from hybridrt.engine.core.traffic_policy import AUTO_FACTOR
from hybridrt.engine.request.outputs import Delta
from hybridrt.runtime.step.pack_padded import DECODE_ROWS, PROMPT_TOKENS, make_buckets
from hybridrt.server.core.service import WAIT_SHARE

OUTPUT = 4  # tokens of each answer
CAPACITY = 13.0  # requests a second that the simulated device answers
WORK_FACTOR, SLACK = 2.0, 1.0


class Sent(NamedTuple):
    """A request that runs. `limit`: seconds within which its first token must come."""

    due: float
    limit: float


@dataclass
class Found:
    """What has happened.

    Attributes:
        worst: greatest first token as a share of its bound; longest: in seconds.
        late: numbers of requests whose first token came too late; overdue: that ended too late.
    """

    requests: int = 0
    refused: int = 0
    worst: float = 0.0
    longest: float = 0.0
    longest_answer: float = 0.0
    late: list[int] = field(default_factory=list)
    overdue: list[int] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.late and not self.overdue


def arrivals(seed: int, count: int, rate: float) -> Iterator[tuple[float, int]]:
    """Times and numbers of prompt tokens."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        share = draw.random()
        prompt = next(each[1] for each in MIX if share < each[0])
        yield now, draw.randint(prompt * 3 // 4, prompt * 5 // 4)


class Run:
    """One run. `timeout`: seconds of a request; None: nothing is refused, and first tokens have the bound."""

    def __init__(self, seed: int, count: int, load: float, timeout: float | None = None) -> None:
        times = StepTimes(sorted(make_buckets(DECODE_ROWS, PROMPT_TOKENS), key=sum))
        self._clock = SimulatedDevice(times, seed)
        self._engine = simulate_serving.engine(self._clock, times, 8192, "auto", 256)
        self._coming = arrivals(seed, count, load * CAPACITY)
        self._draw, self._timeout = np.random.default_rng(seed), timeout
        self._running, self._answered = dict[str, Sent](), set[str]()
        self.found = Found()

    def play(self) -> Found:
        clocks = [mock.patch(f"hybridrt.engine.{name}.time", self._clock) for name in CLOCKS]
        with clocks[0], clocks[1]:
            Player(self._engine, plain(99, 40, 512, 1e9), self._clock).play()  # for the predicted times
            self._play(self._clock.monotonic())
        return self.found

    def _play(self, start: float) -> None:
        coming = next(self._coming, None)
        while coming is not None or self._engine.has_unfinished():
            now = self._clock.monotonic() - start
            while coming is not None and coming[0] <= now:
                self._send(start + coming[0], coming[1])
                coming = next(self._coming, None)
            if not self._engine.has_unfinished():
                self._clock.sleep(max((coming[0] if coming else now) - now, 0.0))
                continue
            wait = min([self._engine.spare_seconds(), *([coming[0] - now] if coming else [])])
            if wait > 0:
                self._clock.sleep(wait)
                continue
            for delta in self._engine.step():
                self._note(delta)

    def _send(self, due: float, tokens: int) -> None:
        number, before = self.found.requests, self._engine.wait_seconds()
        self.found.requests += 1
        if self._timeout is not None and before > WAIT_SHARE * self._timeout:
            self.found.refused += 1
            return
        assert self._engine.policy is not None
        own = AUTO_FACTOR * self._engine.policy.prompt_seconds(PromptWork.between(0, tokens))
        limit = own + WORK_FACTOR * before + SLACK if self._timeout is None else math.inf
        prompt = self._draw.integers(3, VOCAB, tokens)
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, seed=number)
        self._engine.submit(self._engine.prepare(prompt, params), str(number))
        self._running[str(number)] = Sent(due, limit)

    def _note(self, delta: Delta) -> None:
        found, sent = self.found, self._running[delta.request_id]
        seconds = self._clock.monotonic() - sent.due
        if delta.request_id not in self._answered:
            self._answered.add(delta.request_id)
            found.worst, found.longest = max(found.worst, seconds / sent.limit), max(found.longest, seconds)
            if seconds > sent.limit:
                found.late.append(int(delta.request_id))
        if delta.finish_reason is not None:
            del self._running[delta.request_id]
            self._answered.remove(delta.request_id)
            found.longest_answer = max(found.longest_answer, seconds)
            if self._timeout is not None and seconds > self._timeout:
                found.overdue.append(int(delta.request_id))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.9], help="shares of what the device can do")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--timeout", type=float, help="seconds that a request may take")
    return parser.parse_args()


def main() -> None:
    args, holds = parse(), True
    for load in args.load:
        for seed in args.seed:
            found = Run(seed, args.requests, load, args.timeout).play()
            holds &= found.holds
            print(
                f"load {load:g} seed {seed}: {found.requests} requests, {found.refused} refused, longest first token "
                f"{found.longest:.1f} s, {found.worst:.0%} of its bound, longest answer {found.longest_answer:.1f} s, "
                f"late {found.late[:5]}, overdue {found.overdue[:5]}",
                flush=True,
            )
    sys.exit(not holds)


if __name__ == "__main__":
    main()
