"""Chunks next to decode rows are as long as the time between tokens allows; by a clock that the tests move."""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import LLM, AsyncLLM, EngineConfig, SamplingParams
from hybridrt.base.errors import ConfigError
from hybridrt.engine.core.policy_scheduler import PolicyScheduler
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.core.scheduler import Scheduler
from hybridrt.engine.core.step_cost import (
    GRAPH_GAIN,
    LEAST_TOKENS,
    SHORTER,
    ChunkBudget,
    PromptWork,
    StepCost,
    StepWork,
)
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves, make_buckets
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.warm_up import warm_up
from tests.engine.test_scheduler import Bench, request
from tests.support.checkpoints import falcon
from tests.support.tiny import write_tiny

CHUNK = 2048
BUCKETS = sorted(make_buckets((0, 32, 64, 128, 256), (128, 256, 384, 512, 768, 1024)), key=sum)


def seconds(work: StepWork) -> float:
    """A device that takes 4 ms for 200 tokens and less, 20 us for each further one, and time for KV and scores."""
    tokens = work.decode_tokens + work.prompt_tokens
    return 4e-3 + 2e-5 * max(tokens - 200, 0) + 1e-9 * work.decode_context + 5e-10 * work.prompt_pairs


class Known(StepCost):
    """Knows the device from the start. Its graphs take as long as all that they have room for."""

    def __init__(self, max_prompt_tokens: int = CHUNK, buckets: Sequence[Bucket] = ()) -> None:
        super().__init__(buckets)
        self.max_prompt_tokens, self.seen = max_prompt_tokens, list[tuple[list[StepWork], float]]()

    def predict(self, work: StepWork) -> float:
        bucket = self._bucket(work) if work.prompt_tokens else None
        return seconds(work if bucket is None else work._replace(prompt_tokens=sum(bucket) - work.decode_tokens))

    def observe(self, works: Sequence[StepWork], took: float, *, at_most: bool = False) -> None:
        self.seen.append((list(works), took))


class Device(Bench):
    """A scheduler whose steps take as long as the device says."""

    def __init__(
        self, lengths: Sequence[int], target: float | None, cost: StepCost | None = None, **sizes: Any
    ) -> None:
        super().__init__(lengths, **{"rows": 16, "pages": 9999, "page": 16, "chunk": CHUNK} | sizes)
        self.now = 0.0
        self.target = None if target is None else TrafficPolicy(target, cost=cost, clock=lambda: self.now)
        chunk = sizes.get("chunk", CHUNK)
        self.scheduler = (
            Scheduler(self.pools, chunk) if self.target is None else PolicyScheduler(self.pools, chunk, self.target)
        )
        for r in self.requests:
            self.scheduler.add(r)

    def complete(self, step: ScheduledStep) -> None:
        self.now += seconds(StepWork.from_plan(step.plan))
        super().complete(step)

    def join(self, arrival: int, prompt: int) -> None:
        joined = request(arrival, prompt, 500)
        joined.metrics.arrival_time = self.now
        self.scheduler.add(joined)


def decoding(rows: int) -> DecodeRows:
    return DecodeRows.from_rows([DecodeRow(i + 1, 500, 3) for i in range(rows)])


@pytest.mark.parametrize("buckets", [(), BUCKETS])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 64), st.integers(0, 3000), st.integers(0, CHUNK), st.floats(1e-3, 5e-2), st.integers(1, 4096),
    st.integers(0, 900),
)  # fmt: skip
def test_a_chunk_is_the_longest_that_ends_in_time_or_the_fastest_of_a_graph(
    buckets: Sequence[Bucket], rows: int, start: int, tokens: int, target: float, most: int, before: int
) -> None:
    """But for the tokens that a step takes whatever they cost, and no more than twice what has been seen. No other
    chunk of a smaller graph computes about as many tokens a second, nor does the step without it."""
    work, cost = StepWork(rows, 500 * rows), Known(most, buckets)
    budget = ChunkBudget(tokens + before, cost, target, work)
    budget.room(start)
    budget.spend_tokens(0, before)
    work = work.with_chunk(0, before) if before else work
    least, known = min(max(LEAST_TOKENS - before, 0), tokens), min(tokens, 2 * most - before)
    in_time = [n for n in range(1, known + 1) if cost.predict(work.with_chunk(start, n)) <= target]

    def rate(n: int) -> float:
        prompts = work.prompt_rows + (n > 0)
        one = StepWork(rows, 500 * rows, prompts - 1).with_chunk(start, before + n)
        return (before + n) / cost.predict(one)

    longest = max(in_time, default=0)
    graphs = [cost._bucket(work.with_chunk(start, n)) for n in range(longest + 1)]
    of_smaller = [n for n in range(longest) if not n or graphs[n] not in (None, graphs[longest])]
    fastest = max(of_smaller, key=rate, default=0)
    gain = SHORTER if graphs[longest] else GRAPH_GAIN
    chunk = fastest if rate(fastest) > gain * rate(longest) else longest
    assert budget.room(start) == budget.room(start) == max(least, chunk)


class Stairs(Known):
    """Its graphs of 1,536 prompt tokens compute fewer tokens a second than those of 1,024. Attention of more tokens
    takes little longer."""

    TIMES: ClassVar = {128: 7.4, 256: 10.3, 512: 17.2, 768: 22.2, 1024: 26.2, 1536: 42.0}

    def predict(self, work: StepWork) -> float:
        bucket = self._bucket(work)
        depth = work.prompt_context / max(work.prompt_rows, 1)
        attention = 1e-6 * depth * (0.5 + 2e-4 * work.prompt_tokens)
        return (self.TIMES[bucket.tokens] if bucket else 100.0 if work.prompt_tokens else 5.0) / 1e3 + attention


@pytest.mark.parametrize(
    ("bound", "rest", "room"),
    [
        (0.018, 513, 513),  # 22.2 ms; 17.2, and 7.4 for the last token
        (0.018, 512, 512),
        (0.018, 1024, 1024),  # 26.2 ms; two steps of 512 take 34.4
        (0.018, 1100, 512),  # 42 ms are too long
        (0.030, 1030, 1024),  # two steps take 33.6 ms
        (0.070, 1600, 1024),  # without a graph
        (0.011, 300, 256),  # 17.2 ms are too long
    ],
)
def test_the_rest_of_a_prompt_is_not_left_for_another_step(bound: float, rest: int, room: int) -> None:
    """If one step is faster, and not much longer than the bound. With a number of milliseconds the bound holds."""
    cost, work = Stairs(8192, make_buckets((128,), Stairs.TIMES)), StepWork(4, 400)
    assert ChunkBudget(8192, cost, bound, work, most=0.075).room(0, rest) == room
    assert ChunkBudget(rest - 1, cost, bound, work, most=0.075).room(0, rest) < rest
    second = ChunkBudget(8192, cost, bound, work.with_chunk(0, 100), most=0.075)
    assert second.room(0, rest) == second.room(0), "short prompts are not gathered in long steps"
    new = Stairs(rest // 2 - 1, cost._buckets)
    assert ChunkBudget(8192, new, bound, work, most=0.075).room(0, rest) < rest, "no step was half as long"
    assert ChunkBudget(8192, cost, bound, work).room(0, rest) == ChunkBudget(8192, cost, bound, work).room(0)


def test_a_graph_that_is_slower_for_each_token_is_not_taken() -> None:
    """Neither by one prompt nor by one more, although it would end in time. Deep in a context it is the faster one."""
    cost = Stairs(8192, make_buckets((128,), Stairs.TIMES))

    def budget() -> ChunkBudget:
        return ChunkBudget(8192, cost, 0.075, StepWork(4, 500))

    assert budget().room() == 1024 and budget().room(28_000) == 1536
    full = budget()
    full.spend_tokens(0, 1024)
    assert full.room() == 0 and full.room(28_000) == 512
    part = budget()
    part.spend_tokens(28_000, 700)
    assert part.room() == 1024 - 700, "whatever the first prompt's depth"


@pytest.mark.parametrize(("milliseconds", "chunk"), [(38.5, 1024), (37.5, 1536)])
def test_decode_rows_do_not_wait_for_a_graph_that_is_hardly_faster(
    milliseconds: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 2 and by 5%."""
    monkeypatch.setitem(Stairs.TIMES, 1536, milliseconds)
    cost = Stairs(8192, make_buckets((128,), Stairs.TIMES))
    assert ChunkBudget(8192, cost, 0.075, StepWork(4, 500)).room() == chunk
    eight = ChunkBudget(1200, cost, 0.2, StepWork(4, 500))
    for _ in range(8):
        eight.spend_tokens(0, 100)
    assert eight.room() == 0, "no graph has room for a ninth prompt"


@pytest.mark.parametrize(("waiting", "chunk"), [(4000, 1024), (12_000, 1536)])
def test_the_more_work_waits_the_less_faster_a_longer_graph_must_be(
    waiting: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is faster by 5% here, and is taken where that saves 10 milliseconds of what waits."""
    monkeypatch.setitem(Stairs.TIMES, 1536, 37.5)
    policy = TrafficPolicy(None, cost=Stairs(8192, make_buckets((128,), Stairs.TIMES)))
    assert policy.budget(8192, decoding(4), PromptWork(waiting)).room() == chunk


def test_the_rest_of_a_prompt_does_not_make_a_step_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the chunk that would be taken, which may be shorter than the bound allows."""
    monkeypatch.setitem(Stairs.TIMES, 2048, 50.0)
    cost = Stairs(8192, make_buckets((128,), Stairs.TIMES))
    for milliseconds, room in ((50.0, 1024), (41.0, 2000)):  # two steps take 52.4 ms, the first 26.2
        monkeypatch.setitem(Stairs.TIMES, 2048, milliseconds)
        assert ChunkBudget(8192, cost, 0.04, StepWork(4, 400), most=0.075).room(0, 2000) == room


def test_a_graph_is_not_taken_for_prompts_that_do_not_wait() -> None:
    """Two prompts fill two thirds of the large graph, which is as slow as if it were full. The small one computes more
    of their tokens a second, and the rest waits."""
    device = Device([5], 0.2, Known(buckets=[Bucket(32, 512), Bucket(32, 864), Bucket(32, 1536)]))
    device.run(2)
    for arrival in (5, 6):
        device.join(arrival, 512)
    (step,) = device.run(1)
    assert [len(row.tokens) for row in step.plan.extend] == [512, 352]
    policy = TrafficPolicy(0.2, cost=Known())
    assert policy.budget(CHUNK, decoding(1), PromptWork(9)).room() == 9
    assert policy.budget(CHUNK, decoding(0), PromptWork(9)).room() == CHUNK, "more may turn out to wait"


def test_a_step_runs_without_a_graph_where_that_is_faster() -> None:
    """Deep in a context, if the host launches it in time. It has fewer tokens than the largest graph."""

    class Deep(StepCost):
        eager = 0.05

        def _device_seconds(self, work: StepWork, bucket: Bucket | None) -> float:
            return 0.1 if bucket else self.eager / 1.02

    cost = Deep(BUCKETS)
    work = StepWork(1, 500).with_chunk(30_000, 500)
    assert cost.takes_graph(work) and cost.predict(work) is None, "nothing is known"
    cost._costs = [0.0]
    assert cost.takes_graph(work) and cost.predict(work) == 0.1, "no launch has been seen"
    for launch, eager, seconds in ((0.04, 0.05, 0.05), (0.08, 0.05, 0.08), (0.095, 0.05, 0.1), (0.04, 0.095, 0.1)):
        cost._launches.clear()
        cost.note_launch(launch)
        cost.eager = eager
        assert cost.predict(work) == pytest.approx(seconds) and cost.takes_graph(work) == (seconds == 0.1)
    device = Device([5], 0.2, cost)
    device.run(2)
    for eager in (0.05, 0.095):
        cost.eager = eager
        device.join(5, 60)
        (step,) = device.run(1)
        found = StepWork.from_plan(step.plan)
        assert step.plan.extend and step.plan.eager == found.eager == (eager == 0.05)
        assert cost.has_graph(found) != step.plan.eager, "so its time is learnt as that of a step without one"
        assert any(bucket.holds(step.plan, StateSaves.AT_CHUNKS) for bucket in BUCKETS) != step.plan.eager
    device = Device([5], 0.2, Deep([Bucket(4, 8)]))
    device.run(2)
    device.join(5, 60)
    (step,) = device.run(1)
    assert step.plan.extend and not step.plan.eager, "where no graph runs all of a step, one may run its prompts"


@pytest.mark.parametrize(("launch", "least", "most"), [(0.03, 1025, 1500), (0.07, 1024, 1024)])
def test_the_chunk_that_computes_the_most_tokens_a_second(launch: float, least: int, most: int) -> None:
    """A graph, although a longer chunk without one would end in time: the host takes longer to launch it than the
    graph runs."""

    class Launched(Known):
        def predict(self, work: StepWork) -> float:
            eager = bool(work.prompt_tokens) and self._bucket(work) is None
            return max(super().predict(work), launch if eager else 0.0)

    budget = ChunkBudget(1500, Launched(8192, BUCKETS), 0.075, StepWork(100, 500))
    assert least <= budget.room() <= most
    budget = ChunkBudget(1500, Launched(8192, BUCKETS), 0.075, StepWork(400, 500))
    assert budget.room() > 1024, "no graph has so many decode rows"


def test_a_chunk_without_a_graph_is_taken_where_graphs_take_longer() -> None:
    """Attention of the few tokens of a graph may take longer after a long context than that of many."""

    class Deep(Known):
        def predict(self, work: StepWork) -> float:
            graph = bool(work.prompt_tokens) and self._bucket(work) is not None
            return seconds(work) + (1e-6 * work.prompt_context if graph else 0.0)

    for bound, start, least in ((0.075, 30_000, 1025), (0.075, 100, 1000), (0.016, 100, 100)):
        budget = ChunkBudget(8192, Deep(8192, BUCKETS), bound, StepWork(1, 500))
        work = StepWork(1, 500).with_chunk(start, budget.room(start))
        assert work.prompt_tokens >= least and Deep(8192, BUCKETS).predict(work) <= bound


def test_a_chunk_pays_for_what_few_tokens_cost_after_a_long_context() -> None:
    """Where 16 tokens take nearly the whole step, it takes longer, up to `most`, and has many more tokens."""

    class Deep(Known):
        def predict(self, work: StepWork) -> float:
            return seconds(work) + 1e-6 * work.prompt_context

    def chunk(start: int, most: float) -> StepWork:
        budget = ChunkBudget(8192, Deep(8192), 0.02, StepWork(1, 500), most)
        return StepWork(1, 500).with_chunk(start, budget.room(start))

    assert chunk(30_000, 0.0).prompt_tokens == LEAST_TOKENS
    assert chunk(30_000, 0.075).prompt_tokens > 500 and Deep().predict(chunk(30_000, 0.075)) <= 4e-3 + 2 * 0.0303
    assert Deep().predict(chunk(60_000, 0.075)) <= 0.075
    assert chunk(0, 0.075) == chunk(0, 0.0), "there few tokens take little"

    policy, rows, waiting = TrafficPolicy(cost=Deep(8192)), decoding(1), PromptWork(180_000)
    flooded, alone = (policy.budget(8192, rows, waiting, flooded=which).room(30_000) for which in (True, False))
    assert LEAST_TOKENS < flooded < 0.6 * alone, "less next to another client"


def test_steps_without_decode_rows_take_the_whole_budget() -> None:
    target = TrafficPolicy(1e-6, cost=Known())
    assert target.budget(5000, decoding(0)).room() == 5000
    assert LEAST_TOKENS < target.budget(5000, decoding(1)).room() < 300


def test_errors_of_predictions_make_a_margin() -> None:
    cost = Known()
    policy = TrafficPolicy(0.01, cost=cost)
    for error, share in ((None, 1.0), (0.015, 0.97), (0.5, 0.9)):
        cost._errors.extend([] if error is None else [error])
        room = policy.budget(CHUNK, decoding(4), PromptWork(8000)).room()
        assert seconds(StepWork(4, 2000).with_chunk(0, room)) == pytest.approx(0.01 * share, rel=0.01)
        cost._errors.clear()


def test_nothing_is_known_at_first_and_chunks_grow_with_what_is_seen() -> None:
    cost = StepCost()
    target = TrafficPolicy(1.0, cost=cost)
    sizes = []
    for _ in range(12):
        sizes.append(target.budget(CHUNK, decoding(4)).room())
        cost.observe([StepWork(4, 2000).with_chunk(0, sizes[-1])], 0.01)
    assert sizes[:8] == [LEAST_TOKENS] * 8
    assert sizes[8:] == [32, 64, 128, 256]


def test_a_prompt_that_is_given_up_is_no_longer_pending() -> None:
    device = Device([3 * CHUNK], 1.0, Known())
    (request,) = device.requests
    assert device.scheduler.schedule() is not None and isinstance(device.scheduler, PolicyScheduler)
    assert device.target is not None and device.target.backlog > 0
    assert device.scheduler.pending.tokens == 3 * CHUNK - request.computed > 0
    request.finish_reason = "abort"
    device.scheduler.remove(request)
    assert not device.scheduler.pending.tokens and device.target.backlog == 0


def test_prompts_that_join_do_not_stop_the_others() -> None:
    """Learnt while it runs: after that no step with decode rows takes longer than the target, and prompts end."""

    def run(target: float | None) -> list[float]:
        device, took = Device([], target, rows=32), list[float]()
        for prompt in range(12):
            device.join(prompt, 3000)
            while (step := device.run()[0]).plan.extend:
                if len(step.plan.decode) and prompt > 5:
                    took.append(seconds(StepWork.from_plan(step.plan)))
        assert device.target is None or (device.target.cost.error or 1.0) < 0.08
        return took

    kept, fixed = run(0.015), run(None)
    assert max(kept) <= 0.015 * 1.02 and max(fixed) > 0.03
    assert sum(t > 0.012 for t in kept) > 20, "and the time is used"


def test_a_long_prompt_advances_whatever_the_target() -> None:
    """By what makes a step a tenth longer; by a few tokens where even these take longer."""
    device = Device([10], 1e-9, cost=Known())
    device.run(3)
    device.join(5, 1000)
    steps = device.run(5)
    sizes = [len(row.tokens) for step in steps for row in step.plan.extend]
    assert all(200 <= size <= 220 for size in sizes[:4]) and sum(sizes) == 1000 and steps[-1].plan.extend[0].sample
    assert all(len(step.plan.decode) == 1 for step in steps)
    slow = Known()
    slow.predict = lambda work: 1.0 * work.prompt_tokens  # type: ignore[method-assign]
    assert TrafficPolicy(0.5, cost=slow).budget(CHUNK, decoding(1)).room(40) == LEAST_TOKENS


def test_a_step_counts_from_the_end_of_the_one_before() -> None:
    """Launched while that one still ran; a step that samples nothing ends unseen and counts with the next."""
    cost, now = Known(), 0.0
    target = TrafficPolicy(1.0, cost=cost, clock=lambda: now)
    one, part = StepWork(2, 1000), StepWork().with_chunk(0, 50)
    first = target.clock()
    now = 1.0
    second = target.clock()
    now = 3.0
    target.ended(one, first, 2)
    now = 4.5
    target.ended(one, second, 2)
    assert cost.seen == [([one], 3.0), ([one], 1.5)]
    now = 10.0
    third = target.clock()
    now = 10.5
    target.ended(part, third, 0)
    fourth = target.clock()
    now = 12.0
    target.ended(one, fourth, 2)
    assert cost.seen[2:] == [([part, one], 2.0)]


def test_a_step_that_ended_before_it_was_read_counts_with_those_behind_it() -> None:
    """Its launch, or that of the next one, took longer: the host saw the end too late, and the next step would seem to
    take no time. Of a device that is always faster than the host, eight steps count together."""
    cost, ends = Known(), iter([50.0, *range(58, 67, 8)])
    target, one = TrafficPolicy(1.0, cost=cost, clock=lambda: next(ends)), StepWork(2, 1000)
    for late in (True, True, False):
        target.ended(one, 0.0, 2, late)
    assert cost.seen == [([one] * 3, 50.0)]
    for _ in range(16):
        target.ended(one, 50.0, 2, True)
    assert cost.seen[1:] == [([one] * 8, 8.0)] * 2


def test_the_next_step_is_scheduled_before_the_end_of_the_running_one() -> None:
    cost, now, took = Known(), 50.0, 0.01
    target, work = TrafficPolicy(1.0, cost=cost, clock=lambda: now), StepWork(4, 2000)
    cost.predict = lambda _: took  # type: ignore[method-assign]
    target.ended(work, 49.0, 4)
    lead = 50 + took - target.spare_seconds(work, 49.5) - now
    assert 0 < lead < took, "the step before it ended at 50"
    assert target.spare_seconds(work, 50.002) == pytest.approx(0.002 + took - lead), "it was launched later"
    cost._errors.append(0.02)
    assert target.spare_seconds(work, 49.5) == pytest.approx(0.96 * took - lead), "its end may come earlier"
    cost._errors.clear()
    now = 50.0 + took - lead + 1e-4
    assert target.spare_seconds(work, 49.5) == 0.0
    assert TrafficPolicy(1.0, clock=lambda: now).spare_seconds(work, 49.5) == 0.0, "no step has been seen"


def test_a_step_runs_since_the_one_before_it_was_read() -> None:
    """Not since the tokens of that one were handed to their requests: else it would be taken to end later."""
    work = StepWork(4, 2000)
    target, other = (TrafficPolicy(1.0, cost=Known(), clock=lambda: 50.0) for _ in range(2))
    for policy, read in ((target, 49.7), (other, None)):
        policy.cost.predict = lambda _: 1.0  # type: ignore[method-assign]
        policy.ended(work, 49.0, 4, read=read)
    assert target.spare_seconds(work, 49.5) == pytest.approx(other.spare_seconds(work, 49.5) - 0.3)


def test_the_time_for_tokens_does_not_make_steps_longer() -> None:
    """A step that was launched before the end of the one before it takes from one end to the next; one that was
    launched later ends when it is read: else it would be put off by the time for tokens, and seem to take longer."""
    cost, work, now = Known(), StepWork(4, 2000), [50.0]
    target = TrafficPolicy(1.0, cost=cost, clock=lambda: now[0])
    target.ended(work, 49.0, 4, read=49.7)
    now[0] = 50.6
    target.ended(work, 49.5, 4, read=50.2)
    now[0] = 51.5
    target.ended(StepWork().with_chunk(0, 60), 51.0, 1, read=51.3)
    assert [seconds for _, seconds in cost.seen] == pytest.approx([0.7, 0.6, 0.5]), "the last one has no graph"


def test_the_lead_is_as_long_as_all_but_one_of_the_latest_launches() -> None:
    """Not longer, however often the running step ends first: else no prompt would join a step that was put off."""
    now = [50.0]
    target = TrafficPolicy(None, cost=Known(buckets=[Bucket(4, 64)]), clock=lambda: now[0])
    decode, prompt = StepWork(4, 2000), StepWork().with_chunk(0, 60)
    target.cost.predict = lambda _: 1.0  # type: ignore[method-assign]

    def lead() -> float:
        target.ended(decode, now[0], 4)
        return 1.0 - target.spare_seconds(decode, now[0])

    def launch(work: StepWork, scheduling: float, launching: float) -> None:
        asked, launched = now[0], now[0] + scheduling
        now[0] = launched + launching
        target.note_launch(work, asked, launched)

    for seconds in (0.002, 0.004, 0.002, 0.03):
        launch(prompt, seconds, seconds)
    assert lead() == pytest.approx(0.008), "one launch that took 60 ms may be an exception"
    for _ in range(16):
        launch(decode, 0.001, 0.001)
    assert lead() == pytest.approx(0.008), "prompts come seldom, and are not forgotten"
    target.ended(decode, now[0], 4, late=True)
    assert target.spare_seconds(decode, now[0]) == 0.0, "when the next step began is not known"
    for _ in range(20):
        target.ended(decode, now[0], 4, late=True)
    assert lead() == pytest.approx(0.008), "steps that end before the next launch do not make it longer"
    for seconds, expected in ((0.5, 0.1), (0.0001, 0.002)):
        for _ in range(16):
            launch(prompt, 0.0, seconds)
        assert lead() == pytest.approx(expected)
    for seconds, expected in ((0.03, 0.03), (0.0001, 0.001)):
        for _ in range(16):
            launch(decode, 0.0, seconds)
        assert lead() == pytest.approx(expected), "steps of many decode rows take the host as long"


def test_a_step_after_one_that_was_read_late_is_not_observed() -> None:
    """It began before the late end was seen, so it would seem to need no time."""
    now, seen = [50.0], list[float]()
    target, work = TrafficPolicy(1.0, cost=Known(), clock=lambda: now[0]), StepWork(4, 2000)
    target.cost.observe = lambda works, seconds, at_most: seen.append(seconds)  # type: ignore[method-assign]
    for late in (*[True] * 8, False, False):
        now[0] += 1.0
        target.ended(work, now[0] - 1.0, 4, late)
    assert seen == [8.0, 1.0]


def test_launches_that_the_device_waited_for_are_bounds() -> None:
    """Those of steps without a graph: they end with their launch, or before the next one has ended."""
    now, seen = [0.0], list[tuple[float, bool]]()
    target = TrafficPolicy(None, cost=Known(buckets=[Bucket(4, 64)]), clock=lambda: now[0])
    target.cost.observe = lambda works, seconds, at_most: seen.append((seconds, at_most))  # type: ignore[method-assign]
    eager, graph = (StepWork(2, 1000).with_chunk(0, n) for n in (500, 60))

    def step(work: StepWork, launch: float, after: float, late: bool = False) -> None:
        started = target.clock()
        now[0] += launch
        target.note_launch(work, started, started)
        now[0] += after
        target.ended(work, started, 2, late)

    step(eager, 0.09, 0.001)
    step(eager, 0.07, 0.02)
    step(graph, 0.09, 0.001)
    assert [at_most for _, at_most in seen] == [True, False, False]
    for _ in range(8):
        step(eager, 0.09, 0.06, late=True)
    assert seen[3] == (pytest.approx(8 * 0.15), True)
    step(graph, 0.001, 0.01)
    for _ in range(8):
        step(graph, 0.001, 0.01, late=True)
    assert not seen[-1][1], "the host limits decoding alone, too: such a step takes as long"
    target.cost._buckets.clear()
    step(eager, 0.09, 0.001)
    step(eager, 0.09, 0.001)
    assert not seen[-1][1], "on a CPU a launch computes the step"


def test_tokens_are_the_same_and_the_error_is_counted(tmp_path: Any) -> None:
    """Chunks change when prompts are computed, and no token."""
    path = str(write_tiny(tmp_path, falcon(), tokenizer=False))
    prompts = [[7 + i] * n for i, n in enumerate((120, 3, 200, 90, 40))]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    found = []
    for target in (None, 0.1, 1e6):
        options: dict[str, Any] = {"max_model_len": 256, "max_running_requests": 4, "chunked_prefill_size": 150}
        with LLM(path, device="cpu", load_format="dummy", target_itl_ms=target, **options) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, params)])
            error = llm.engine.counters().step_cost_error
            assert error is None if target is None else error is not None
    assert found[0] == found[1] == found[2]


def test_a_policy_is_for_gpus_unless_it_has_a_number() -> None:
    auto, cuda = EngineConfig("x", target_itl_ms="auto"), torch.device("cuda")
    assert TrafficPolicy.from_config(auto, torch.device("cpu"), ()) is None
    assert TrafficPolicy.from_config(EngineConfig("x"), cuda, ()) is None
    fixed, free = (
        TrafficPolicy.from_config(EngineConfig("x", target_itl_ms=15), cuda, BUCKETS),
        TrafficPolicy.from_config(auto, cuda, BUCKETS),
    )
    assert fixed is not None and free is not None and (fixed.seconds, free.seconds) == (0.015, None)
    assert fixed.cost.fills(StepWork()) == free.cost.fills(StepWork()) != []
    assert free.budget(CHUNK, decoding(0)).room() == CHUNK


@pytest.mark.parametrize(
    ("alone", "pending", "bound"),
    [
        (0.005, 0.0, 0.020), (0.005, 0.03, 0.020), (0.005, 0.06, 0.035), (0.005, 0.6, 0.075), (0.003, 9.0, 0.060),
        (0.020, 0.6, 0.080), (0.005, 0.8, 0.080), (0.005, 9.0, 0.0935),
        (0.004, 9.0, 0.080),
    ],
)  # fmt: skip
def test_without_a_number_a_step_is_longer_if_more_work_waits(alone: float, pending: float, bound: float) -> None:
    """Four times its decode rows, or half of the pending work with them: up to 20 times and 75 ms.
    With much work it may be 95 ms."""
    assert TrafficPolicy().bound(alone, pending) == pytest.approx(bound)


@pytest.mark.parametrize(("pending", "bound"), [(0.0, 0.015), (0.25, 0.015), (0.375, 0.0225), (0.5, 0.03), (9.0, 0.03)])
def test_a_number_gives_way_to_a_deep_queue(pending: float, bound: float) -> None:
    """Up to twice the number; and to decode rows that need it alone."""
    assert TrafficPolicy(0.015).bound(0.005, pending) == pytest.approx(bound)
    assert TrafficPolicy(0.015).bound(0.040, pending) == pytest.approx(0.044)


def test_prompts_get_a_share_of_the_time_whatever_the_target() -> None:
    """A prompt that takes twice as long has half of the time."""
    config = EngineConfig("x", target_itl_ms=5, max_ttft_factor=2)
    policy = TrafficPolicy.from_config(config, torch.device("cuda"), ())
    assert policy is not None and policy.bound(0.02, 9.0) == pytest.approx(0.04)
    with pytest.raises(ConfigError, match="max_ttft_factor"):
        EngineConfig("x", max_ttft_factor=1.0)


@pytest.mark.parametrize("wrong", [0, -1.0, True, "15", "none", float("nan"), 1e9, [15], np.array([15, 20])])
def test_a_target_is_a_number_of_milliseconds(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="target_itl_ms"):
        EngineConfig("x", target_itl_ms=wrong)


def test_a_server_has_measured_steps_before_it_is_ready(tmp_path: Any) -> None:
    path = str(write_tiny(tmp_path, falcon(), tokenizer=False))
    with AsyncLLM(path, device="cpu", load_format="dummy", target_itl_ms=50, max_running_requests=4) as llm:
        asyncio.run(warm_up(llm))
        target = llm.llm.engine.policy
        assert target is not None and target.cost.max_prompt_tokens >= 100
        seconds = [target.cost.predict(StepWork(2, 60).with_chunk(0, n)) for n in (16, 100)]
        assert None not in seconds and 0 < seconds[0] <= seconds[1]  # type: ignore[operator]
        assert b"hybridrt:step_cost_error_ratio{" in Metrics(llm, "m").text()
