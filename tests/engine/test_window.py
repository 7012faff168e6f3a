"""KV pages under a sliding window: a request holds boundedly many, whatever its length, and gives the others back once
no launched step reads them."""

from collections.abc import Sequence

import numpy as np
import pytest

from hybridrt.base.errors import MemoryBudgetError
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slab_plan import plan_slabs
from hybridrt.runtime.step.plan import StepPlan
from tests.engine.test_scheduler import Bench, request
from tests.support.engine_harness import Rig, set_computed


@pytest.mark.parametrize(("page", "window"), [(1, 1), (2, 4), (4, 3), (4, 4), (4, 9), (16, 5)])
def test_least_is_what_a_window_can_touch(page: int, window: int) -> None:
    touched = max(len({p // page for p in range(start, start + window)}) for start in range(page))
    assert PageDemand(page, window).least(10**6) == touched
    assert PageDemand(page, window).least(page) == 1 and PageDemand(page).least(10 * page) == 10


def test_a_long_prompt_holds_few_pages_and_hands_them_down() -> None:
    bench = Bench([100], page=2, chunk=6, window=4)
    demand = PageDemand(2, 4, 6)
    (r,) = bench.requests
    ahead = bench.launch()
    assert bench.pools.pages.num_used == demand.prefilling(100) == 8, "window - 1 and two chunks: 15 tokens"
    for _ in range(16):
        step = bench.launch()
        assert bench.pools.pages.num_used <= 8
        assert len(step.plan.extend[0].tokens) == 6 or step.plan.extend[0].sample
        bench.complete(ahead)
        ahead = step
    assert r.computed == r.prefill_end
    bench.complete(ahead)
    assert not len(r.pages.spare[0]) and bench.pools.pages.num_used == len(r.pages.held[0]) == 2
    for _ in range(30):
        bench.run()
        assert bench.pools.pages.num_used <= demand.least(200)


def test_a_prompt_keeps_only_the_pages_that_its_rest_needs() -> None:
    pools, r, plan = CacheCoordinator(1, 0, [50], [PageDemand(1, 2, 9)]), request(0, 24), StepPlan()
    assert pools.admit_request(r, 0, plan) and r.end_page == 19, "24 tokens; a window and two chunks of 9 are 19"
    for kept, settled in ((1, 2), (3, 4), (5, 6), (5, 8), (5, 10)):
        pools.settle(r, 2)
        assert (r.settled, len(r.pages.spare[0]), pools.pages.num_used) == (settled, kept, 19 - (settled - 1) + kept)
    assert pools.use_spare_pages(r, 24, plan) == 24 and (r.end_page, r.pages.spare) == (24, [[]])
    set_computed(r, 24)
    pools.release(r)
    pools.check()


def test_pages_of_a_request_are_looked_up_once_where_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    demands = [PageDemand(1), PageDemand(1, 2, 9)]
    pools, r, plan = CacheCoordinator(1, 0, [50, 50], demands), request(0, 24), StepPlan()
    assert pools.admit_request(r, 0, plan)
    looked, look = list[int](), EntryAllocator._indices

    def count(allocator: EntryAllocator, handles: Sequence[Handle]) -> np.ndarray:
        looked.append(len(handles))
        return look(allocator, handles)

    monkeypatch.setattr(EntryAllocator, "_indices", count)
    pools.release(r)
    assert looked == [24, 19], "the pages of each group"
    pools.check()


def test_pages_go_back_when_the_step_that_reads_them_has_been_consumed() -> None:
    bench = Bench([8], window=4)
    bench.run()
    (r,) = bench.requests
    assert (r.pages.starts, len(r.pages.held[0]), r.settled) == ([5], 3, 8), "the token at 8 sees 5, 6 and 7"
    first, second = bench.launch(), bench.launch()
    assert (r.pages.starts, len(r.pages.held[0])) == ([5], 5), "both are launched"
    bench.complete(first)
    assert (r.pages.starts, len(r.pages.held[0])) == ([6], 4), "the second one's token, at 9, sees 6"
    bench.complete(second)
    assert (r.pages.starts, len(r.pages.held[0])) == ([7], 3)


def test_rejected_drafts_hold_the_window_back() -> None:
    rig = Rig(drafts=4, windows=(5,), page_size=1, pages=40, max_model_len=60)
    rig.finish([3] * 9, max_tokens=40, seed=1, ignore_eos=True)
    assert any(len(plan.decode.drafts) for plan in rig.executor.plans)


def test_a_pool_smaller_than_two_chunks_makes_chunks_shorter() -> None:
    bench = Bench([30], page=2, chunk=8, window=4, pages=4)
    chunks = [len(row.tokens) for step in bench.run(14) for row in step.plan.extend]
    assert sum(chunks) == 30 and max(chunks) == 8 and min(chunks[1:-1]) < 8
    waiting = Bench([30], page=2, chunk=8, window=4, pages=4)
    waiting.launch()
    assert waiting.scheduler.schedule() is None, "until the launched chunk has been consumed"


def test_a_request_longer_than_the_pool_is_taken_unless_its_window_is() -> None:
    rig = Rig(pages=6, page_size=2, windows=(9,), max_model_len=64)
    assert len(rig.finish([1] * 40, max_tokens=20, seed=0, ignore_eos=True).token_ids) == 20
    with pytest.raises(MemoryBudgetError, match="needs 5 KV pages and there are 4"):
        Rig(pages=4, page_size=2, windows=(9,), max_model_len=64).add([1] * 40)


def test_a_failed_launch_gives_nothing_back_early() -> None:
    rig = Rig(windows=(3,), page_size=1, chunk=4, late=2)
    rig.executor.fail_launch[2] = RuntimeError("no")
    output = rig.finish([1] * 20, max_tokens=4, seed=0)
    assert output.finish_reason == "abort" and str(output.error).endswith("RuntimeError: no")


def test_retraction_starts_over() -> None:
    bench = Bench([4, 4], page=1, pages=9, window=5)
    steps = bench.run(12)
    assert bench.scheduler.num_retractions and bench.waiting() == [1]
    victim = bench.requests[1]
    assert (victim.pages.starts, victim.settled, victim.end_page, victim.pages.spare) == ([], 0, 0, [])
    bench.scheduler.remove(bench.requests[0])
    bench.pools.check()
    steps += bench.run(3)
    assert bench.running() == [1] and steps[-1].plan.decode


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_a_window_mix_hold_little_more_than_their_windows(shared: bool) -> None:
    """32 rows of 32,768 tokens of five window layers to one without: what all layers hold while they decode, in pages
    of their own, and in the slabs of one memory."""
    rows, length, page, window, layers, cell = 32, 32_768, 16, 1024, [1, 5], 2**15
    sizes = [2 * count * cell for count in layers]
    demands = [PageDemand(page, None, 8192), PageDemand(page, window, 8192, back=page - 1)]
    budget = 70_000 * sizes[0] + 4_000 * sizes[1]
    slabs = plan_slabs(budget, sizes, [cell] * 2, own_pages=0, page_size=page) if shared else None
    pools = CacheCoordinator(
        rows, 0, [70_000, 4_000], demands, prefix_cache=True, page_bytes=sizes, slabs=slabs
    )  # fmt: skip
    requests = [request(number, length) for number in range(rows)]
    for number, each in enumerate(requests):
        each.prompt[0] = number + 7  # no prefix is shared
        plan = StepPlan()
        assert pools.admit_request(each, 0, plan)
        for end in range(8192, length + 1, 8192):
            assert pools.use_spare_pages(each, end, plan) == end
            set_computed(each, end)
            pools.settle(each, 8192)
        for token in range(40):
            assert pools.grow(each, length + token + 1, plan)
            set_computed(each, length + token + 1)
            pools.settle(each, 1)
    need = rows * ((length + 40) * sizes[0] + window * sizes[1]) / page
    held = pools.pages.held_bytes
    if slabs is not None and pools.slabs is not None:
        free, _ = pools.slabs.room()  # the cache would give up the others
        held = (slabs.num_slabs - free) * slabs.slab_bytes
    assert need <= held <= 1.1 * need
    assert held < 0.25 * rows * (length + 40) * sum(sizes) / page, "what one page table for all layers would hold"
