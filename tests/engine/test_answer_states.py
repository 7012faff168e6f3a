"""States within answers: a history that leaves an answer anywhere starts from one, and nobody else pays for them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.engine.cache import answer_states
from hybridrt.engine.cache.answer_states import AT_ONCE, MOST
from hybridrt.engine.cache.host_tier import HostTier
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import PageAllocators, no_sets
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import StateKind
from hybridrt.runtime.step.plan import StepPlan
from tests.engine.test_prefix_states import rig_with_cache
from tests.support.cache_ledger import check_cache
from tests.support.engine_harness import VOCAB, Rig
from tests.support.levels import sweep
from tests.support.mock_executor import tokens_alone

PROMPT, COUNT, GRID = [3, 1, 4, 1, 5, 9], 40, 4


@pytest.fixture(autouse=True, scope="module")
def few_tokens_apart() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_states, "APART", GRID)
        yield


def rig_of(*, rows: int = 2, slots: int = 30, grid: int = GRID, **config: Any) -> Rig:
    grid = max(grid, config.get("page_size", 1))
    return rig_with_cache(rows=rows, slots=slots, pages=2000, grid=grid, max_model_len=300, **config)


def recomputed(rig: Rig, history: list[int]) -> int:
    """Tokens of a history, other than its last, that a request computes again. What it answers is right."""
    text = [*history, history[-1] + 1, 2]
    again = rig.finish(text, max_tokens=2, ignore_eos=True, seed=9)
    assert again.token_ids == tokens_alone(text, 9, 2, VOCAB)
    return len(history) - again.metrics.cached_tokens


def states(rig: Rig, kind: StateKind = StateKind.ANSWER) -> list[int]:
    """Where the states of a kind are."""
    nodes = rig.pools.prefixes.tree.nodes()
    return sorted(node.end for node in nodes if node.state is not None and node.kind is kind)


@pytest.mark.parametrize(
    ("drafts", "overlap", "page_size", "replay"),
    sweep(
        [(*way, r) for way in ((0, True, 1), (0, False, 4), (3, True, 1), (3, False, 4)) for r in (False, True)],
        7,
        thin=3,
    ),
)
def test_wherever_a_history_leaves_an_answer_the_grid_bounds_what_is_computed_again(
    drafts: int, overlap: bool, page_size: int, replay: bool
) -> None:
    """The prompt's own state is up to a grid before its end, and the first step that leaves one up to APART after it.
    With drafts a row may have moved on by just less than APART when the others leave theirs."""
    for cut in range(1, COUNT):
        rig = rig_of(drafts=drafts, overlap=overlap, page_size=page_size, replay=replay)
        answer = rig.finish(PROMPT, max_tokens=COUNT, ignore_eos=True, seed=1).token_ids
        assert recomputed(rig, PROMPT + answer[:cut]) <= (2 * GRID + drafts if drafts else GRID + 1)


def copies_of(plan: StepPlan) -> list[StateMove]:
    """The states within answers that a step leaves."""
    return [move for move in plan.moves if move.when is When.BEFORE_ROWS]


def test_with_few_slots_the_states_of_an_answer_are_far_apart() -> None:
    rig = rig_of(rows=1, slots=4)
    rig.finish(PROMPT, max_tokens=COUNT, ignore_eos=True, seed=1)
    assert states(rig, StateKind.PROMPT) == [4] and states(rig, StateKind.END) == [45]
    assert states(rig) == [25, 41]


def test_without_slots_nothing_is_left() -> None:
    rig = rig_of(rows=1, slots=1)
    rig.finish(PROMPT, max_tokens=COUNT, ignore_eos=True, seed=1)
    assert not any(copies_of(plan) for plan in rig.executor.plans)


def test_other_states_are_not_evicted_for_them() -> None:
    """The first conversation's states stay where they are while another one decodes, and while it ends."""
    rig = rig_of(rows=1, slots=7)
    rig.finish([8, 8, 8, 8, 8, 8], max_tokens=2, ignore_eos=True, seed=2)
    rig.finish(PROMPT, max_tokens=COUNT, ignore_eos=True, seed=1)
    rig.finish([9, *PROMPT], max_tokens=COUNT, ignore_eos=True, seed=1)
    assert states(rig, StateKind.PROMPT) == [4, 4, 4] and states(rig, StateKind.END) == [7, 45, 46]
    assert states(rig) == [38]


def test_a_running_request_gives_them_up_for_others() -> None:
    """They have all slots but three: the next request gets its own, and one for its prompt's state."""
    rig = rig_of(rows=2, slots=8)
    rig.add(PROMPT, "long", max_tokens=100, ignore_eos=True, seed=1)
    for _ in range(25):
        rig.step()
    assert len(rig.pools.prefixes.answers.places) == 6 and not rig.pools.slots.num_free
    rig.add([7, 7, 7, 7, 7, 7], "next", max_tokens=2, ignore_eos=True, seed=2)
    for _ in range(8):
        rig.step()
    assert rig.outputs["next", 0].finish_reason == "length"
    assert states(rig, StateKind.PROMPT) == [4, 4] and states(rig, StateKind.END) == [7]
    rig.run()
    assert rig.outputs["long", 0].token_ids == tokens_alone(PROMPT, 1, 100, VOCAB)


def test_no_conversation_gives_up_the_state_that_it_started_from_for_their_sake() -> None:
    """They have all free slots when the next turn leaves the state of its prompt."""
    rig = rig_of(rows=2, slots=10)
    turn = [8, 8, 8, 8, 8, 8]
    turn += rig.finish(turn, max_tokens=2, ignore_eos=True, seed=2).token_ids
    rig.add(PROMPT, "long", max_tokens=100, ignore_eos=True, seed=1)
    for _ in range(40):
        rig.step()
    assert len(rig.pools.prefixes.answers.places) > 3 and states(rig, StateKind.END) == [7]
    rig.add([*turn, *range(10, 20)], "next", max_tokens=2, ignore_eos=True, seed=3)
    for _ in range(8):
        rig.step()
    assert rig.outputs["next", 0].metrics.cached_tokens == 7 and states(rig, StateKind.END) == [7, 19]


@pytest.mark.parametrize("rows", [1, AT_ONCE, 12])
def test_few_steps_leave_states_and_few_of_them(rows: int) -> None:
    """One step in APART, AT_ONCE in a step at most. No row is left out for good."""
    rig = rig_of(rows=rows, slots=40 * rows, chunk=200)
    for seed in range(rows):
        rig.add([*PROMPT, seed], max_tokens=120, ignore_eos=True, seed=seed)
    rig.run()
    counts = [len(copies_of(plan)) for plan in rig.executor.plans]
    assert {i % GRID for i, count in enumerate(counts) if count} == {0} and max(counts) == min(rows, AT_ONCE)
    by_row = Counter(move.row for plan in rig.executor.plans for move in copies_of(plan))
    assert len(by_row) == rows and max(by_row.values()) <= 2 * min(by_row.values()) + 1
    assert sum(counts) >= (len(counts) // GRID - 1) * min(rows, AT_ONCE)


def test_a_state_that_a_prompt_starts_from_is_kept_like_a_prompts() -> None:
    rig = rig_of()
    answer = rig.finish(PROMPT, max_tokens=COUNT, ignore_eos=True, seed=1).token_ids
    recomputed(rig, [*PROMPT, *answer[:23]])
    assert 29 not in states(rig) and 29 in states(rig, StateKind.PROMPT)
    assert {25, 33} <= set(states(rig))


def test_an_answer_that_was_aborted_behind_accepted_drafts_is_not_lost() -> None:
    """The device has computed tokens that no reader got: the state at the end is not that of the text."""
    lost = []
    for steps in range(10, 18):
        rig = rig_of(drafts=3, overlap=True, late=1)
        name = rig.add(PROMPT, max_tokens=60, ignore_eos=True, seed=1)
        for _ in range(steps):
            rig.step()
        rig.engine.abort(name)
        rig.run()
        answer = rig.outputs[name, 0].token_ids
        assert answer == tokens_alone(PROMPT, 1, len(answer), VOCAB) and len(answer) > 8
        lost.append(recomputed(rig, [*PROMPT, *answer]))
    assert max(lost) <= GRID + 4, lost


def test_main_memory_and_sessions_have_none() -> None:
    rig = rig_of(host=(400, 40))
    answer = rig.finish(PROMPT, max_tokens=COUNT, ignore_eos=True, seed=1).token_ids
    rig.finish([7], max_tokens=1, seed=1)  # launches the copies
    store = rig.pools.prefixes
    assert len(states(rig)) > 5 and rig.engine.counters().host_states == 3
    text = np.array([*PROMPT, *answer], np.int32)
    assert [length for length, _ in store.path(text, DEFAULT_KEY)[1]] == [4, 45]
    assert [length for length, _ in store.path(text[:30], DEFAULT_KEY)[1]] == [4, 29]


TURNS = given(
    cuts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=6),
    slots=st.integers(2, 12),
    drafts=st.sampled_from([0, 3]),
    page_size=st.sampled_from([1, 4, 16]),
    replay=st.booleans(),
    overlap=st.booleans(),
    host=st.sampled_from([None, (60, 4)]),
    late=st.integers(0, 2),
    at_once=st.sampled_from([1, AT_ONCE]),
)


@pytest.mark.parametrize(
    "examples", [20, pytest.param(50, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)]
)
def test_any_turns_get_what_they_get_alone(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(TURNS(play_turns))()


def play_turns(cuts: list[tuple[int, int]], slots: int, at_once: int, host: Any, **config: Any) -> None:
    """Each turn keeps some of the text of the last one. The rig checks the ledgers after every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_states, "AT_ONCE", at_once)
        rig = rig_of(rows=2, slots=slots, host=host, **config)
        text = PROMPT
        for seed, (kept, count) in enumerate(cuts):
            prompt = [*text[:kept], seed, 2]
            rig.add(prompt, f"{seed} a", max_tokens=count, ignore_eos=True, seed=seed)
            rig.add(prompt[:-1], f"{seed} b", max_tokens=9, ignore_eos=True, seed=seed)
            rig.run()
            answer = rig.outputs[f"{seed} a", 0].token_ids
            assert answer == tokens_alone(prompt, seed, count, VOCAB)
            assert rig.outputs[f"{seed} b", 0].token_ids == tokens_alone(prompt[:-1], seed, 9, VOCAB)
            text = prompt + answer


def test_two_rows_do_not_leave_their_states_in_one_slot() -> None:
    """Both are due in the same step, and one slot is there."""
    rig = rig_of(rows=2, slots=3, chunk=64)
    for seed in (1, 2):
        rig.add(PROMPT, str(seed), max_tokens=COUNT, ignore_eos=True, seed=seed)
    rig.run()
    for seed in (1, 2):
        assert rig.outputs[str(seed), 0].token_ids == tokens_alone(PROMPT, seed, COUNT, VOCAB)


def test_no_request_waits_for_them() -> None:
    """They have all slots but one, and nothing else is cached."""
    rig = rig_of(rows=2, slots=3)
    rig.add(PROMPT, "long", max_tokens=100, ignore_eos=True, seed=1)
    for _ in range(10):
        rig.step()
    rig.pools.prefixes.evict([0], 3)
    for _ in range(20):
        rig.step()
    assert len(rig.pools.prefixes.answers.places) == 2 and not rig.pools.slots.num_cached
    rig.add([7, 7], "next", max_tokens=2, ignore_eos=True, seed=2)
    rig.step()
    assert not rig.engine.counters().waiting
    rig.run()


def test_a_change_that_was_broken_off_leaves_none() -> None:
    rig = rig_of(rows=1)
    rig.add(PROMPT, max_tokens=100, ignore_eos=True, seed=1)
    for _ in range(20):
        rig.step()
    assert len(rig.pools.prefixes.answers.places) > 2
    rig.engine._recover()
    check_cache(rig.pools)


def test_a_slot_that_is_being_copied_to_main_memory_is_not_written_before() -> None:
    tier = HostTier(PageAllocators([], []), 2, RadixCache(0, True), lambda _: False)
    tier.offer(np.array(PROMPT, np.int32), no_sets(0), {4: Handle(5, 0)}, "")
    plan = StepPlan(moves=[StateMove(1, 5, 5, When.FIRST)])
    tier.seal(plan)
    assert not plan.after_copies, "the copy is of what the donation leaves there"
    plan = StepPlan(moves=[StateMove(1, 1, 5, When.BEFORE_ROWS)])
    tier.seal(plan)
    assert plan.after_copies == tier.last_ticket == 1


@pytest.mark.parametrize("rows", [1, 9])
def test_a_request_holds_few_states(rows: int) -> None:
    """With nine rows the budget puts them further apart than they are due."""
    rig = rig_of(rows=rows, slots=60 * rows, grid=1, chunk=200)
    for seed in range(rows):
        rig.add([*PROMPT, seed], max_tokens=280, ignore_eos=True, seed=seed)
    most = 0
    while rig.engine.has_unfinished():
        rig.step()
        held = Counter(request.request_id for request, _ in rig.pools.prefixes.answers.places.values())
        most = max(most, *held.values(), 0)
    assert MOST * (rows == 1) <= most <= MOST


def test_drafts_put_the_states_at_most_twice_as_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has moved on by just less than the distance is passed over once, and a step has 3 drafts."""
    monkeypatch.setattr(answer_states, "APART", 16)
    rig = rig_of(drafts=3)
    rig.finish(PROMPT, max_tokens=200, ignore_eos=True, seed=1)
    apart = np.diff([4, *states(rig), len(PROMPT) + 200])
    assert len(apart) > 6 and max(apart) < 2 * 16 + 4 and min(apart[1:-1]) >= 16


def test_states_within_all_answers_of_a_text_are_few() -> None:
    """The oldest are given up, and with them the nodes that later turns would walk through."""
    rig, text = rig_of(slots=200), [*PROMPT]
    for turn in range(6):
        text += [*rig.finish(text, max_tokens=COUNT, ignore_eos=True, seed=turn).token_ids, turn]
    assert len(states(rig)) == MOST and min(states(rig)) > len(text) - MOST * (GRID + 1)
    nodes = list(rig.pools.prefixes.tree.nodes())
    assert all(node.state is not None for node in nodes) and len(nodes) <= MOST + 2 * 6


def test_a_long_answer_leaves_few_states_evenly_spaced() -> None:
    rig = rig_of(slots=200, grid=1)
    answer = rig.finish(PROMPT, max_tokens=280, ignore_eos=True, seed=1).token_ids
    assert MOST // 2 <= len(states(rig)) <= MOST
    assert max(recomputed(rig, PROMPT + answer[:cut]) for cut in (50, 111, 230, 279)) <= 280 / (MOST // 2)
