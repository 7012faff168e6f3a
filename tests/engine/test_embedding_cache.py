"""The ledger of embeddings on the device, and the tasks that fill it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from hybridrt.base.spans import EncoderInput, Span
from hybridrt.engine.cache.embedding_cache import EmbeddingCache, SpanKey
from hybridrt.engine.core import encoder_tasks
from hybridrt.engine.core.encoder_tasks import EncoderTasks
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows, StepPlan
from tests.support.levels import draw, examples

DECODING = DecodeRows.from_rows([DecodeRow(1, 2, 3)])


def key(name: int) -> SpanKey:
    return SpanKey(DEFAULT_KEY, bytes([name]) * 32)


def span(name: int, start: int, rows: int, columns: int) -> Span:
    patches = np.zeros((4 * rows * columns, 12), np.uint8)
    given = EncoderInput(patches, (2 * rows, 2 * columns))
    return Span(start, rows * columns, bytes([name]) * 32, (rows, columns), given)


def request(arrival: int, *spans: Span, salt: str = "") -> Any:
    return SimpleNamespace(arrival=arrival, spans=spans, cache_key=CacheKey(salt))


def encoder(num_rows: int, ended: int = 10**6) -> EncoderTasks:
    return EncoderTasks(EmbeddingCache(num_rows), lambda ticket: ticket <= ended, mrope=False)


STEPS = st.tuples(st.sampled_from(["add", "pin", "unpin", "unpin_all"]), st.integers(0, 5), st.integers(0, 3))


@examples(quick=30, most=1000)
def test_rows_are_never_lost_shared_or_taken_from_a_reader(examples: int) -> None:
    draw(examples, check_ledger, st.lists(STEPS))


def check_ledger(steps: list[tuple[str, int, int]]) -> None:
    cache, held = EmbeddingCache(8), dict[SpanKey, tuple[np.ndarray, set[int]]]()
    for step, name, arrival in steps:
        found = cache.find(key(name))
        if step == "add" and found is None:
            pinned = sum(len(rows) for rows, readers in held.values() if readers)
            entry = cache.add(key(name), name + 1, 1)
            assert (entry is not None) == (pinned + name + 1 <= 8)
            if entry is not None:
                held[key(name)] = entry.rows.copy(), set()
        elif step == "pin" and found is not None:
            cache.pin(key(name), arrival)
            held[key(name)][1].add(arrival)
        elif step == "unpin":
            cache.unpin(key(name), arrival)
            held.get(key(name), (None, set()))[1].discard(arrival)
        elif step == "unpin_all":
            cache.unpin_all(arrival)
            for _, readers in held.values():
                readers.discard(arrival)
        cache.check()
        for each, (rows, readers) in list(held.items()):
            entry = cache.find(each)
            if entry is None:
                assert not readers, "an entry with readers was evicted"
                del held[each]
            else:
                assert np.array_equal(entry.rows, rows) and entry.readers == readers


def test_the_entry_that_was_used_last_stays() -> None:
    cache = EmbeddingCache(4)
    for name in (1, 2):
        cache.add(key(name), 2, name)
    cache.find(key(1))
    cache.add(key(3), 1, 3)
    assert cache.find(key(1)) and not cache.find(key(2)) and cache.num_free == 1


def test_a_chunk_takes_the_part_of_a_span_that_it_has() -> None:
    tasks, plan = encoder(8), StepPlan()
    one = request(1, span(1, 3, 2, 3))
    assert tasks.end_for_spans(one, 0, 5, plan) == 5
    first = tasks.take_rows(one, 0, 5, plan)
    assert first is not None and first.places.tolist() == [3, 4] and plan.after_encoder == 1
    tasks.begin_step()
    later = StepPlan()
    assert tasks.end_for_spans(one, 5, 20, later) == 20 and not later.encode
    rest = tasks.take_rows(one, 5, 20, later)
    assert rest is not None and rest.places.tolist() == [0, 1, 2, 3]
    assert [*first.rows, *rest.rows] == plan.encode[0].rows.tolist()
    assert tasks.cache.find(key(1)).readers, "tasks of the same step may not take its rows"  # type: ignore[union-attr]
    tasks.begin_step()
    assert not tasks.cache._pinned[1], "the prompt is past its span"


@pytest.mark.parametrize(("decoding", "ended", "end"), [(False, 0, 9), (True, 0, 2), (True, 1, 9)])
def test_only_a_step_without_decode_rows_waits_for_the_encoder(decoding: bool, ended: int, end: int) -> None:
    tasks = encoder(8, ended)
    plan = StepPlan(decode=DECODING if decoding else DecodeRows())
    assert tasks.end_for_spans(request(1, span(1, 2, 1, 4)), 0, 9, plan) == end and len(plan.encode) == 1
    assert tasks.counts.waits == (end < 9)


def test_a_chunk_that_begins_in_a_span_waits_for_all_of_it() -> None:
    tasks, plan = encoder(8, ended=0), StepPlan(decode=DECODING)
    assert tasks.end_for_spans(request(1, span(1, 2, 1, 4)), 4, 9, plan) == 4


def test_the_budget_ends_a_chunk_but_allows_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_tasks, "STEP_TOKENS", 3)
    tasks, plan = encoder(100), StepPlan()
    both = request(1, span(1, 0, 2, 2), span(2, 6, 1, 1))
    assert tasks.end_for_spans(both, 0, 10, plan) == 6 and [task.ticket for task in plan.encode] == [1]
    tasks.begin_step()
    assert tasks.end_for_spans(both, 6, 10, plan) == 10 and len(plan.encode) == 2


def test_pinned_embeddings_of_others_make_a_prompt_wait() -> None:
    tasks, plan = encoder(5), StepPlan()
    first, second = request(1, span(1, 0, 2, 2)), request(2, span(2, 3, 1, 2))
    assert tasks.end_for_spans(first, 0, 2, plan) == 2
    tasks.take_rows(first, 0, 2, plan)
    assert tasks.end_for_spans(second, 0, 9, plan) == 3
    tasks.forget(first)  # it is retracted
    assert tasks.end_for_spans(second, 0, 9, plan) == 9
    tasks.cache.check()


def test_one_task_serves_all_requests_of_one_salt() -> None:
    tasks, plan = encoder(20), StepPlan()
    for arrival, salt in ((1, ""), (2, ""), (3, "other")):
        tasks.end_for_spans(request(arrival, span(1, 0, 2, 2), salt=salt), 0, 9, plan)
    assert [task.ticket for task in plan.encode] == [1, 2]
    assert (tasks.counts.spans, tasks.counts.tokens, tasks.counts.hits) == (2, 8, 1)


def test_what_the_device_evicts_is_fetched_from_main_memory() -> None:
    tasks = encoder(4)
    tasks.host = EmbeddingCache(9)
    plans = []
    for name in (1, 2, 1, 3, 1, 2, 4, 1):
        plans.append(StepPlan())
        one = request(len(plans), span(name, 0, 2, 2))
        assert tasks.end_for_spans(one, 0, 9, plans[-1]) == 9
        tasks.forget(one)
    made = [[task.ticket for task in plan.encode] for plan in plans]
    assert made == [[1], [2], [], [3], [], [4], [5], [6]], "main memory has two of them"
    first, third = plans[0].encode[0], plans[2].fetch[0]
    assert third.host_rows.tolist() == first.host_rows.tolist() and len(third.rows) == 4
    assert plans[2].after_encoder == 0 and tasks.counts.host_hits == 2 and tasks.counts.spans == 6
    tasks.host.check()


def test_only_embeddings_that_were_made_are_fetched() -> None:
    tasks = encoder(4, ended=0)
    tasks.host = EmbeddingCache(9)
    for name, host_rows in ((1, 4), (2, 4), (1, 0)):
        one, plan = request(1, span(name, 0, 2, 2)), StepPlan()
        tasks.end_for_spans(one, 0, 9, plan)
        tasks.forget(one)
        assert len(plan.encode[0].host_rows) == host_rows and not plan.fetch
    tasks.clear()
    assert tasks.host.find(key(1)) is None


def test_a_failed_launch_forgets_what_it_may_not_have_made() -> None:
    tasks, plan = encoder(20), StepPlan()
    one = request(1, span(1, 0, 2, 2))
    tasks.end_for_spans(one, 0, 9, plan)
    tasks.clear()
    again = StepPlan()
    tasks.begin_step()
    assert tasks.end_for_spans(one, 0, 9, again) == 9 and len(again.encode) == 1
    assert replace(plan).encode[0].ticket < again.encode[0].ticket
