"""The order in which a policy computes prompts: by client, by priority, first come, first served, short ones pass."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.core.client_queues import (
    ACTIVE_SECONDS,
    ENDED_SECONDS,
    FLOOD_SECONDS,
    ClientQueues,
    PromptOrder,
)
from hybridrt.engine.core.prompt_waiters import PromptWaiters
from hybridrt.engine.core.scheduler import AGE_SECONDS, Scheduler
from hybridrt.engine.core.step_cost import PromptWork, StepWork
from hybridrt.engine.core.traffic_policy import MOST_PASSING, SHARED_SECONDS, TrafficPolicy
from hybridrt.engine.request.sample_request import Request
from hybridrt.runtime.step.plan import NO_ROWS
from tests.engine.test_scheduler import request
from tests.support.engine_harness import Rig

SECOND = 40_000  # tokens that take a second before steps have run, without pairs


class Queue:
    """One queue at second 100; `add` takes seconds of waiting and of work."""

    def __init__(self) -> None:
        self.policy = TrafficPolicy(clock=lambda: 100.0)
        self.queues, self.count = ClientQueues(self.policy), 0

    def add(self, waited: float, seconds: float, priority: int = 0, client: str = "") -> Request:
        found = request(self.count, 4)
        found.params, found.client = replace(SamplingParams(), priority=priority), client
        found.metrics.arrival_time = 100.0 - waited
        self.count += 1
        self.queues.add(found, PromptWork(int(SECOND * seconds)))
        return found

    def order(self) -> list[int]:
        """If none passes."""
        self.policy.passing = 0
        return [each.arrival for each in self.next(len(self.queues))[0]]

    def prompts(self) -> PromptOrder:
        return PromptOrder(self.queues, PromptWaiters(Rig(cache=True).pools.prefixes), ())

    def next(self, count: int) -> tuple[list[Request], int]:
        """The next waiting ones of a step, which leave the queue, and what may pass after them."""
        order, found = self.prompts(), list[Request]()
        for _ in range(count):
            first = order.next()
            assert first is not None
            found.append(first)
            self.queues.remove(first)
        return found, order.passing


def test_the_first_is_served_first() -> None:
    queue = Queue()
    for waited, seconds in ((1.0, 1.0), (0.9, 0.01), (0.5, 0.1), (0.001, 1.0)):
        queue.add(waited, seconds)
    assert [each.arrival for each in queue.queues] == [0, 1, 2, 3]
    assert queue.order() == [0, 1, 2, 3] and not len(queue.queues) and queue.queues.pending == PromptWork()


def test_short_prompts_pass_earlier_ones_with_a_part_of_each_step() -> None:
    queue = Queue()
    long, *shorts = [queue.add(9.0, 10.0), *(queue.add(1.0, 0.01) for _ in range(3))]
    queue.add(1.0, 0.02)
    for queue.policy.passing, first in ((399, long), (400, shorts[0])):
        assert queue.prompts().next() is first
    queue.policy.passing = 1000
    found, passing = queue.next(3)
    assert found == [*shorts[:2], long], "two of 400 tokens have room, a third one has not"
    assert passing == 200
    queue.policy.note_passing(passing, 1001)
    assert queue.policy.passing == 534, "a third of each step's tokens, whole prompts at a time"
    queue.policy.note_passing(2000, 8192)
    assert queue.policy.passing == MOST_PASSING


def test_the_short_prompt_with_the_highest_response_ratio_passes() -> None:
    queue = Queue()
    long, late, early, tiny = (queue.add(*each) for each in ((9.0, 10.0), (0.1, 0.04), (0.1, 0.02), (0.05, 0.001)))
    assert queue.next(4)[0] == [tiny, early, long, late], "1,600 tokens are more than are left of 2,048"


def test_only_what_passes_is_counted() -> None:
    """Short prompts that are first in any case leave room for those that come after a long one."""
    queue = Queue()
    shorts = [queue.add(1.0, 0.01) for _ in range(4)]
    assert queue.next(4) == (shorts, MOST_PASSING)


def test_priority_comes_first_until_a_request_has_aged() -> None:
    queue = Queue()
    queue.add(2.0, 0.01, priority=1)
    queue.add(1.0, 1.0, priority=0)
    queue.add(AGE_SECONDS + 0.9, 1.0, priority=1)
    queue.add(0.5, 0.01, priority=-1)
    assert queue.order() == [3, 1, 0, 2]
    queue.add(1.0, 1.0, priority=0)
    queue.add(AGE_SECONDS + 1.1, 1.0, priority=1)
    queue.add(2 * AGE_SECONDS + 1.0, 1.0, priority=2)
    assert queue.order() == [5, 4, 6]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 5)), min_size=1, max_size=60))
def test_heads_of_classes_have_about_the_highest_ratios(items: list[tuple[float, float]]) -> None:
    queue, found = Queue(), dict[int, Request]()
    first = queue.add(60.0, 9.0)
    for waited, seconds in sorted(items, reverse=True):
        each = queue.add(waited, seconds)
        found[each.arrival] = each
    while found:
        heads = queue.queues.candidates("")
        assert first in heads
        best = max((each for each in heads if each is not first), key=queue.queues.ratio)
        assert 1.5 * queue.queues.ratio(best) >= max(map(queue.queues.ratio, found.values()))
        queue.queues.remove(found.pop(best.arrival))


def test_without_a_policy_priorities_come_first_and_age_too() -> None:
    """Nobody waits for ever for requests of a higher priority."""
    scheduler = Scheduler(Rig().pools, 99)
    for arrival, (seconds, priority) in enumerate(
        [(0.0, 1), (1.0, 0), (1.0, 0), (2.0, 1), (AGE_SECONDS - 0.1, 0), (AGE_SECONDS + 0.1, 0)]
    ):
        each = request(arrival, 4)
        each.params, each.metrics.arrival_time = replace(each.params, priority=priority), seconds
        scheduler.add(each)
    assert [each.arrival for each in scheduler.queues] == [1, 2, 4, 0, 5, 3]


def test_clients_get_their_shares() -> None:
    """One floods; the other's requests come between. A client that was idle gets no credit."""
    queue = Queue()
    queue.policy.weights = {"b": 2.0}
    for _ in range(60):
        queue.add(1.0, 0.1, client="a")
    served = list[str]()
    for i in range(50):
        if i == 20:
            for _ in range(30):
                queue.add(0.0, 0.1, client="b")
        client = min(queue.queues.clients, key=queue.queues.spent)
        (first,) = queue.queues.candidates(client)
        queue.queues.charge(first, PromptWork(SECOND // 10))
        queue.queues.remove(first)
        served.append(client)
    assert set(served[:20]) == {"a"} and served[20:].count("b") in (20, 21) and "b" in served[20:22]


def test_steps_are_short_while_one_client_floods_and_another_is_active() -> None:
    queue, now = Queue(), [100.0]
    queue.policy.clock = lambda: now[0]
    flood = [queue.add(0.0, FLOOD_SECONDS / 2, client="flood") for _ in range(2)]
    assert not queue.queues.flooded, "nobody else is active"
    queue.queues.remove(queue.add(0.0, 0.1, client="quiet"))
    assert not queue.queues.flooded, "nobody floods"
    flood.append(queue.add(0.0, 0.1, client="flood"))
    assert queue.queues.flooded
    now[0] += ACTIVE_SECONDS + 1
    assert not queue.queues.flooded, "the other one has gone"
    queue.queues.remove(queue.add(0.0, 0.1, client="quiet"))
    for each in flood[1:]:
        queue.queues.remove(each)
    queue.queues.end_floods([])
    assert queue.queues.flooded, "a flood lasts while a long prompt waits"
    queue.queues.remove(flood[0])
    last: Any = SimpleNamespace(client="flood", computed=0, prefill_end=SECOND)
    queue.queues.end_floods([last])
    assert queue.queues.flooded, "and while one is computed"
    last.computed = SECOND - int(SECOND * ENDED_SECONDS / 4)
    short = queue.add(0.0, ENDED_SECONDS / 4, client="flood")
    queue.queues.end_floods([last])
    assert not queue.queues.flooded, "a client that always has a short prompt floods no more"
    queue.queues.remove(short)
    for _ in range(3):
        for client in ("flood", "quiet"):
            queue.add(0.0, FLOOD_SECONDS / 2, client=client)
    assert not queue.queues.flooded, "both flood"


def test_a_step_of_a_flood_is_bounded_without_decode_rows_too() -> None:
    policy = TrafficPolicy()
    for tokens in (16, 64, 256, 1024, 2048) * 4:
        policy.cost.observe([StepWork().with_chunk(0, tokens)], 0.004 + tokens * 5e-5)
    waiting = PromptWork(180_000)
    found = policy.budget(4096, NO_ROWS, waiting, flooded=True).room()
    assert found == pytest.approx((SHARED_SECONDS - 0.004) / 5e-5, rel=0.2)
    assert policy.budget(4096, NO_ROWS, waiting).room() == 4096
    assert policy.bound(0.01, 9.0, flooded=True) == pytest.approx(0.01 + SHARED_SECONDS)


def test_idle_clients_are_forgotten() -> None:
    queue, now = Queue(), [100.0]
    queue.policy.clock = lambda: now[0]
    for i in range(300):
        now[0] += 1.0
        each = queue.add(0.0, 0.1, client=str(i))
        queue.queues.charge(each, PromptWork(SECOND // 10))
        queue.queues.remove(each)
    assert len(queue.queues._active) == len(queue.queues._spent) < 2 * ACTIVE_SECONDS + 10
    assert queue.queues.spent("0") == 0.0 < queue.queues.spent("299")


def test_the_backlog_is_what_is_left_of_all_prompts() -> None:
    rig = Rig(rows=2, max_model_len=64, chunk=16, policy=TrafficPolicy())
    assert rig.engine.wait_seconds() == 0.0
    for name in "abc":
        rig.add([3] * 40, name, max_tokens=2, ignore_eos=True)
    waits = [rig.engine.wait_seconds()]
    while rig.engine.has_unfinished():
        rig.step()
        waits.append(rig.engine.wait_seconds())
    assert waits[0] == pytest.approx(2 * 120 / SECOND, rel=0.1), "next to decode rows and prompts that pass"
    assert waits == sorted(waits, reverse=True) and len(set(waits)) > 5 and waits[-1] == 0.0


def test_a_request_waits_for_what_a_running_prompt_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running prompt leaves a state where the other one parts, and is passed by nobody meanwhile."""
    monkeypatch.setattr("hybridrt.engine.core.prompt_waiters.LEAST_SHARED", 8)
    rig = Rig(
        rows=3, slots=12, pages=90, max_model_len=64, chunk=8, replay=True, cache=True, grid=4, policy=TrafficPolicy()
    )
    text = [int(token) for token in np.arange(40) % 7]
    rig.add([*text, 1, 2], "first", max_tokens=3, ignore_eos=True)
    rig.step()
    rig.add([*text[:30], 9, 9], "second", max_tokens=3, ignore_eos=True)
    rig.add([9, *text], "other", max_tokens=3, ignore_eos=True)
    assert rig.engine._scheduler._waiters and rig.engine.counters().waiting == 2
    rig.run()
    cached = {name: output.metrics.cached_tokens for (name, _), output in rig.outputs.items()}
    assert cached == {"first": 0, "second": 28, "other": 0}
    computed = rig.engine.counters().prompt_tokens
    assert computed == 42 + 4 + 41
