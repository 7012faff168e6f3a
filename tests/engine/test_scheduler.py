"""The scheduler's and the coordinator's decisions, seen in the plans: budgets, fairness, admission, retraction."""

from collections.abc import Sequence

import pytest

from hybridrt.base.errors import PoolError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.core.scheduler import Scheduler
from hybridrt.engine.request.outputs import RequestMetrics
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.runtime.step.plan import StepPlan, int32s
from hybridrt.speculative.drafter import Draft, Drafter, DraftRequest
from tests.support.engine_harness import Rig, set_computed


def request(arrival: int, prompt_len: int, max_tokens: int = 50) -> Request:
    return Request(
        request_id=f"r{arrival}",
        index=0,
        arrival=arrival,
        prompt=[arrival] * prompt_len,
        prompt_ids=int32s([arrival] * prompt_len),
        params=SamplingParams(),
        seed=0,
        max_len=prompt_len + max_tokens,
        stop_ids=frozenset(),
        stream=False,
        metrics=RequestMetrics(prompt_len, 0.0),
    )


class Bench:
    """A scheduler whose steps gain one token for each row that samples."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        rows: int = 8,
        pages: int = 99,
        page: int = 1,
        chunk: int = 8,
        window: int | None = None,
    ) -> None:
        demands = [PageDemand(page, window, chunk)] if pages else []
        self.pools = CacheCoordinator(rows, rows, [pages] * len(demands), demands)
        self.scheduler = Scheduler(self.pools, chunk)
        self.requests = [request(i, n) for i, n in enumerate(lengths)]
        for r in self.requests:
            self.scheduler.add(r)

    def launch(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def complete(self, step: ScheduledStep) -> None:
        for r, most in step.rows:
            r.output += [0] * min(most, 1)
        self.scheduler.step_consumed(step, [min(most, 1) for _, most in step.rows])
        self.pools.check()

    def run(self, steps: int = 1) -> list[ScheduledStep]:
        done = []
        for _ in range(steps):
            done.append(self.launch())
            self.complete(done[-1])
        return done

    def waiting(self) -> list[int]:
        return [r.arrival for r in self.scheduler.waiting]

    def running(self) -> list[int]:
        return list(self.scheduler.running)


def shape(step: ScheduledStep) -> tuple[list[int], list[tuple[int, bool]]]:
    """Decode rows, and the extend rows' chunk lengths with whether they sample."""
    return step.plan.decode.rows.tolist(), [(len(row.tokens), row.sample) for row in step.plan.extend]


def test_a_prompt_longer_than_the_budget_comes_in_chunks_and_only_the_last_samples() -> None:
    bench = Bench([20], chunk=8)
    assert [shape(step) for step in bench.run(4)] == [
        ([], [(8, False)]),
        ([], [(8, False)]),
        ([], [(4, True)]),
        ([1], []),
    ]


def test_the_budget_is_shared_first_come_first_served() -> None:
    bench = Bench([5, 6, 4], chunk=8)
    assert shape(bench.launch()) == ([], [(5, True), (3, False)])
    assert bench.waiting() == [2]


def test_decode_rows_run_in_every_step_and_count_towards_the_budget() -> None:
    bench = Bench([2, 2, 40], chunk=8)
    first, *later = bench.run(8)
    assert shape(first) == ([], [(2, True), (2, True), (4, False)])
    assert all(shape(step) == ([1, 2], [(6, False)]) for step in later[:5])
    assert shape(later[5]) == ([1, 2], [(6, True)])
    assert shape(later[6]) == ([1, 2, 3], [])


def test_prefill_gets_half_of_the_budget_however_many_decode() -> None:
    bench = Bench([1] * 6 + [9], chunk=6)
    assert [shape(step)[1] for step in bench.run(4)[1:]] == [[(3, False)], [(3, False)], [(3, True)]]
    single = Bench([1, 1, 3], chunk=1)
    assert [len(step.plan.extend) for step in single.run(5)] == [1] * 5, "even a budget of one token"


def test_admission_waits_for_a_row_and_for_pages_with_one_to_spare_for_each_runner() -> None:
    assert [len(step.plan.admissions) for step in Bench([1, 1, 1], rows=2).run(2)] == [2, 0]
    bench = Bench([4, 4], pages=9, chunk=99)
    bench.run()
    assert bench.running() == [0, 1], "4 + 4 pages, and one for the runner"
    bench = Bench([4, 4], pages=8, chunk=99)
    bench.run()
    assert bench.running() == [0]


def test_no_request_overtakes_the_queues_head() -> None:
    bench = Bench([4, 8, 1], pages=10, chunk=99)
    bench.run(2)
    assert bench.running() == [0] and bench.waiting() == [1, 2]


def test_admission_waits_for_a_state_slot() -> None:
    bench = Bench([1, 1], rows=4)
    held = bench.pools.slots.alloc(3)
    bench.run(2)
    assert bench.running() == [0]
    bench.pools.slots.free(held)
    bench.run()
    assert bench.running() == [0, 1]


def test_retraction_takes_the_latest_and_puts_it_first_in_the_queue() -> None:
    bench = Bench([2, 2, 2, 30], pages=10, chunk=99, rows=3)
    bench.requests[2].params = SamplingParams(presence_penalty=1.0)
    bench.run(2)
    assert bench.running() == [0, 1, 2] and bench.waiting() == [3] and bench.pools.pages.num_free == 1
    (step,) = bench.run()
    assert len(step.plan.decode) == 2
    assert bench.running() == [0, 1] and bench.waiting() == [2, 3]
    victim = bench.requests[2]
    assert (len(victim.output), victim.computed, victim.end_page, victim.metrics.retractions) == (2, 0, 0, 1)
    assert bench.scheduler.num_retractions == 1
    bench.requests[0].finish_reason = "length"
    bench.scheduler.remove(bench.requests[0])
    again = bench.run(1)[0]
    assert bench.running() == [1, 2]
    (admission,) = again.plan.admissions
    assert admission.prompt_len == 2 and list(again.plan.extend[0].tokens) == [2, 2, 0, 0]
    assert (admission.counted.tolist(), admission.output.tolist()) == ([2], [0, 0])
    assert again.plan.extend[0].output_index == 2 and again.plan.extend[0].sample


def test_no_retraction_and_no_admission_while_a_step_is_in_flight() -> None:
    bench = Bench([2, 3, 1], pages=4, page=2, chunk=5)
    bench.run()
    first = bench.launch()
    assert first.plan.decode.rows.tolist() == [1, 2] and bench.pools.pages.num_free == 0
    second = bench.launch()
    assert second.plan.decode.rows.tolist() == [1], "the other finds no page: what can run runs"
    assert bench.scheduler.schedule() is None and bench.running() == [0, 1]
    bench.complete(first)
    assert bench.scheduler.schedule() is None and bench.running() == [0, 1]
    bench.complete(second)
    third = bench.launch()
    assert third.plan.decode.rows.tolist() == [1]
    assert bench.running() == [0] and bench.waiting() == [1, 2]


def test_no_request_is_admitted_while_a_decode_row_lacks_a_page() -> None:
    bench = Bench([2, 3], pages=5, page=2, chunk=99)
    bench.run()
    bench.launch()
    spare = bench.pools.pages.alloc([1])
    bench.launch()
    bench.scheduler.add(request(2, 1))
    assert bench.scheduler.schedule() is None
    bench.pools.pages.free(spare)
    step = bench.launch()
    assert step.plan.decode.rows.tolist() == [1] and not step.plan.admissions, "the page goes to the decode row"


class Watching(Drafter):
    """Proposes one token for each request, and notes which requests have begun."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        self.gained: dict[int, int] = {}

    def begin_request(self, request: DraftRequest) -> None:
        assert request.arrival not in self.begun and request.row is not None
        self.begun[request.arrival] = len(request.output)

    def end_request(self, request: DraftRequest) -> None:
        del self.begun[request.arrival]

    def after_step(self, requests: Sequence[DraftRequest], gained: Sequence[int]) -> None:
        for request, tokens in zip(requests, gained, strict=True):
            self.gained[request.arrival] = self.gained.get(request.arrival, 0) + tokens
            assert self.begun[request.arrival] + self.gained[request.arrival] == len(request.output)

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        assert all(request.arrival in self.begun for request in requests)
        return [Draft([7] * min(1, n)) for n in max_drafts]


def test_rows_that_wait_for_their_tokens_rejoin_the_others() -> None:
    """A prompt ends in a step of its own while the other rows decode: from the next step on all decode together."""
    bench = Bench([2], chunk=99)
    bench.scheduler = Scheduler(bench.pools, 99, Watching())
    bench.scheduler.add(bench.requests[0])
    bench.run()
    first = bench.launch()
    bench.scheduler.add(request(1, 5))
    launched, sizes = [first, bench.launch()], []
    for _ in range(12):
        bench.complete(launched.pop(0))
        step = bench.scheduler.schedule()
        if step is not None:
            launched.append(step)
            sizes.append(len(step.plan.decode))
    assert sizes == [2] * 11, "12 steps of one row each, two at a time, would decode half as much"


def test_rows_without_drafts_are_launched_before_their_tokens_are_known() -> None:
    class Hopeless(Watching):
        """Waits for request 1 while its output is short, and proposes nothing."""

        def waits(self, request: DraftRequest) -> bool:
            return request.arrival == 1 and len(request.output) < 3

        def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
            return [Draft() for _ in requests]

    bench = Bench([2, 2], chunk=99)
    bench.scheduler = Scheduler(bench.pools, 99, Hopeless())
    for r in bench.requests:
        bench.scheduler.add(r)
    bench.run()
    for _ in range(2):
        step = bench.launch()
        assert bench.scheduler.schedule() is None, "request 0 could go on, and would leave request 1 behind"
        bench.complete(step)
    launched = [bench.launch(), bench.launch()]
    assert [step.plan.decode.rows.tolist() for step in launched] == [[1, 2], [1, 2]]
    assert launched[1].plan.decode.computed.tolist() == [5, 5]
    for step in launched:
        bench.complete(step)


def test_a_drafter_gets_begin_and_end_of_each_row() -> None:
    """Requests begin when they are admitted, and end with a retraction, an abort, or with all others at once."""
    bench = Bench([4, 4], pages=10, chunk=99)
    drafter = Watching()
    bench.scheduler = Scheduler(bench.pools, 99, drafter)
    for r in bench.requests:
        bench.scheduler.add(r)
    bench.run()
    assert drafter.begun == {0: 0, 1: 0} and drafter.gained == {0: 1, 1: 1}
    bench.run()
    bench.run()
    assert bench.scheduler.num_retractions == 1 and list(drafter.begun) == [0]
    bench.requests[0].finish_reason = "abort"
    bench.scheduler.remove(bench.requests[0])
    assert not drafter.begun
    drafter.gained.clear()
    bench.run()
    assert list(drafter.begun) == [1] and drafter.begun[1] > 0, "it keeps its output"
    bench.scheduler.clear()
    assert not drafter.begun


def test_launched_tokens_are_upper_bounds_that_results_lower() -> None:
    class Threes(Drafter):
        def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Draft]:
            return [Draft([7] * min(3, n)) for n in max_drafts]

    bench = Bench([2], chunk=99)
    bench.scheduler = Scheduler(bench.pools, 99, Threes())
    bench.scheduler.add(bench.requests[0])
    r = bench.requests[0]
    bench.run()
    step = bench.launch()
    assert step.rows == [(r, 4)] and (r.computed, r.pending, r.end_page) == (6, 4, 6)
    assert bench.scheduler.schedule() is None, "drafts wait for the tokens that they follow"
    r.output += [0, 0]
    bench.scheduler.step_consumed(step, [2])
    assert (r.computed, r.pending) == (4, 0)
    assert bench.launch().plan.decode.computed.tolist() == [4]


def test_drafts_give_way_when_pages_are_short() -> None:
    class Threes(Drafter):
        def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[Draft]:
            return [Draft([7, 7, 7]) for _ in requests]

    bench = Bench([2, 1], pages=6, chunk=99)
    bench.scheduler = Scheduler(bench.pools, 99, Threes())
    for r in bench.requests:
        bench.scheduler.add(r)
    bench.run()
    assert bench.launch().plan.decode.num_drafts.tolist() == [0, 0]
    assert not bench.scheduler.num_retractions


def test_prefill_leaves_no_page_behind_an_abort_in_flight() -> None:
    bench = Bench([20], chunk=8)
    step = bench.launch()
    r = bench.requests[0]
    r.finish_reason = "abort"
    bench.scheduler.remove(r)
    assert bench.pools.pages.num_used == 20, "the step in flight writes them"
    bench.scheduler.step_consumed(step, [0])
    assert bench.pools.pages.num_used == bench.pools.rows.num_used == bench.pools.slots.num_used == 0


def test_release_refuses_what_is_in_flight_or_already_released() -> None:
    bench = Bench([3])
    step = bench.launch()
    r = bench.requests[0]
    with pytest.raises(PoolError, match="1 launched steps"):
        bench.pools.release(r)
    bench.complete(step)
    bench.pools.release(r)
    with pytest.raises(PoolError, match="row None"):
        bench.pools.release(r)
    bench.pools.check()


def test_pages_written_cover_what_steps_compute() -> None:
    bench = Bench([5], page=4, chunk=99)
    writes = [w for step in bench.run(5) for w in step.plan.page_writes]
    assert [(w.row, w.first_page, len(w.pages)) for w in writes] == [(1, 0, 2), (1, 2, 1)]
    assert bench.requests[0].end_page == 3, "nine tokens computed"


def test_without_pages_no_request_waits_for_a_spare_one() -> None:
    bench = Bench([3, 3, 3], pages=0, chunk=99)
    bench.run()
    assert bench.running() == [0, 1, 2]


def test_models_without_attention_or_without_recurrence_need_no_pages_or_slots() -> None:
    plain = Rig(pages=0)
    plain.finish([1] * 30, max_tokens=10, seed=0)
    assert not any(plan.page_writes for plan in plain.executor.plans)
    attention_only = Rig(slots=0)
    attention_only.finish([1] * 3, max_tokens=10, seed=0)
    assert attention_only.executor.plans[0].admissions[0].state_slot == 0


def test_locked_pages_are_not_evicted() -> None:
    pools = CacheCoordinator(4, 0, [8], [PageDemand(2)], prefix_cache=True)
    pages = pools.pages
    scheduler = Scheduler(pools, 99)
    first, second, third = request(1, 7), request(1, 7), request(3, 15)
    plan = StepPlan()
    assert pools.admit_request(first, 0, plan) and first.computed == 0
    set_computed(first, 7)
    pools.release(first)
    assert (pages.num_cached, pages.num_used) == (3, 0), "three whole pages stay"
    scheduler.add(second)
    step = scheduler.schedule()
    assert step is not None and [(row.computed, len(row.tokens)) for row in step.plan.extend] == [(6, 1)]
    assert step.plan.page_writes[0].pages.tolist() == [[p.index] for p in second.pages.held[0]]
    assert len(second.prefix.pages) == 3 and second.end_page == 4 and (pages.num_used, pages.num_locked) == (1, 3)
    assert not pools.admit_request(third, 0, StepPlan()) and pages.num_cached == 3
    assert not pools.admit_request(request(1, 15), 0, StepPlan())
    assert pages.num_locked == 3, "a refused admission locks nothing"
    scheduler.step_consumed(step, [1])
    pools.release(second)
    assert (pages.num_cached, pages.num_used, pages.num_locked) == (3, 0, 0)
    assert pools.admit_request(third, 0, StepPlan()), "unlocked ones give way"
    pools.release(third)
    pools.check()
