"""Which state of a radix tree goes first, and which one makes room for another."""

import pytest

from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_node import StateKind
from hybridrt.mem_cache.prefix_tree.state_worth import RECENT, NewState, StateWorths
from tests.mem_cache.test_radix_cache import NO_SETS, Ledger, array, read, tokens_of


def test_a_state_goes_first_once_its_one_reader_has_left_one_behind_it() -> None:
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4, 5, 6), (6,))
    ledger.offer((9,), (1,))
    read(ledger, (1, 2, 3, 4, 5, 6, 7))
    ledger.offer((1, 2, 3, 4, 5, 6, 7), (7,))
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(9,), (1, 2, 3, 4, 5, 6, 7)}


def test_a_state_with_two_readers_stays() -> None:
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4, 5, 6), (6,))
    ledger.offer((9,), (1,))
    for last in (7, 8):
        read(ledger, (1, 2, 3, 4, 5, 6, last))
        ledger.offer((1, 2, 3, 4, 5, 6, last), (7,))
    ledger.evict(0, 3)
    assert tokens_of(ledger) == {(1, 2, 3, 4, 5, 6)}


def test_the_kind_of_state_that_serves_stays() -> None:
    ledger = Ledger(0, True)
    for first in range(20):  # prompts of 4, whose states serve, and answers of 5, whose states never do
        text = (first, *range(8))
        ledger.offer(text, (4, 9))
        read(ledger, (*text[:4], 99))
        ledger.evict(0, 2 if first < 19 else 1)
    assert tokens_of(ledger) == {(19, 0, 1, 2)}


def test_what_waiting_requests_will_use_goes_last() -> None:
    ledger = Ledger(0, True)
    for first in (1, 2, 3, 4):
        ledger.offer((first, 0, 0), (3,))
    ledger.tree.expect(array((1, 0, 0, 0)), 50)
    ledger.tree.expect(array((2, 0, 0, 0)), 10)
    gone = ledger.tree.evict([], 4, new=NewState(9))
    for state in gone.states:
        del ledger.states[state]
    assert tokens_of(ledger) == {(1, 0, 0), (2, 0, 0)}
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(2, 0, 0)}
    ledger.tree.forget(10)
    assert ledger.tree.evict([], 1, new=NewState(9)).states


def test_who_waits_for_a_state_that_is_gone_waits_for_the_one_above() -> None:
    """The system prompt's state serves all requests whose own state was evicted."""
    ledger = Ledger(0, True)
    tree = ledger.tree
    ledger.offer((1, 2, 3, 4, 5, 6, 7), (4, 7))
    tree.expect(array((1, 2, 3, 4, 5, 6, 7, 8)), 9)
    tree.expect(array((1, 2, 3, 4, 9)), 3)
    assert tree.evict([], 1).states
    assert tree.match(array((1, 2, 3, 4, 5, 6, 7, 8))).length == 4
    tree.forget(3)
    assert not tree.evict([], 1, new=NewState(9)).states
    tree.forget(9)
    assert tree.evict([], 1, new=NewState(9)).states


def test_a_state_counts_for_requests_that_waited_before_it_was_there() -> None:
    """Otherwise the first of several siblings would keep nothing for the next one."""
    ledger = Ledger(0, True)
    ledger.offer((1, 2), (2,))
    ledger.tree.expect(array((1, 2, 3, 4, 5)), 8)
    ledger.tree.expect(array((1, 2, 3, 9)), 9)
    ledger.offer((7,) * 9, (9,))
    ledger.offer((1, 2, 3, 4), (4,))
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(1, 2), (1, 2, 3, 4)}
    ledger.tree.forget(9)
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(1, 2, 3, 4)}, "request 8 no longer awaits the one above"


def test_a_request_whose_state_is_gone_awaits_the_next_one_that_comes() -> None:
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3), (3,))
    ledger.tree.expect(array((1, 2, 3, 4)), 8)
    ledger.evict(0, 1)
    ledger.offer((1, 2), (2,))
    ledger.offer((7,) * 9, (9,))
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(1, 2)}


def test_thousands_of_requests_that_await_one_state_cost_no_more_than_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worth looks at all requests that await the state. Once for each request froze a step for seconds."""
    looked, of_awaited, count = list[int](), StateWorths._of_awaited, 500
    monkeypatch.setattr(
        StateWorths, "_of_awaited", lambda self, saved, at: (looked.append(len(at)), of_awaited(self, saved, at))[1]
    )
    ledger = Ledger(0, True)
    ledger.offer((1, 2), (2,))
    for arrival in range(1, count + 1):
        ledger.tree.expect(array((1, 2, 3, arrival)), arrival)
    ledger.offer((1, 2, 3), (3,))  # all of them go on from there
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(1, 2, 3)} and sum(looked) < 8 * count
    looked.clear()
    for arrival in range(1, count + 1):
        ledger.tree.forget(arrival)
    ledger.offer((9,) * 9, (9,))
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(9,) * 9} and sum(looked) < 8 * count


@pytest.mark.parametrize(
    ("saved", "arrivals", "gives_way"), [(99, [], False), (4, [20], False), (4, [19], True), (2, [20, 21], False),
                                         (2, [18, 19], True)]
)  # fmt: skip
def test_an_awaited_state_gives_way_to_what_is_needed_more_and_sooner(
    saved: int, arrivals: list[int], gives_way: bool
) -> None:
    """It saves 4 tokens to the request that arrived as number 20: 0.2 tokens for each request until then."""
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4), (4,))
    ledger.tree.expect(array((1, 2, 3, 4, 5)), 20)
    assert bool(ledger.tree.evict([], 1, new=NewState(saved, arrivals)).states) == gives_way


def test_where_prompts_part_a_state_stays_after_its_first_reader() -> None:
    """A system prompt's state, say. That of a single conversation goes."""
    for forks in ({}, {3: StateKind.FORK}):
        ledger = Ledger(0, True)
        ledger.tree.insert(array((1, 2, 3, 4)), NO_SETS, {3: (slot := ledger.slot())}, kinds=forks)
        ledger.states[slot] = (1, 2, 3)
        ledger.offer((9,), (1,))
        match = ledger.tree.match(array((1, 2, 3, 5)))
        read(ledger, (1, 2, 3, 5))
        ledger.offer((1, 2, 3, 5), (4,))
        ledger.evict(0, 1)
        assert ((1, 2, 3) in tokens_of(ledger)) == bool(forks)
        if forks:
            assert ledger.tree.supersede(match) is None


def test_a_state_is_superseded_if_no_other_request_uses_it() -> None:
    for other in ("", "waits", "reads", "has read"):
        ledger = Ledger(0, True)
        tree = ledger.tree
        ledger.offer((1, 2, 3), (3,))
        match = tree.match(array((1, 2, 3, 4)))
        tree.lock(match)
        if other == "waits":
            tree.expect(array((1, 2, 3, 5)), 4)
        elif other:
            tree.lock(match)
            if other == "has read":
                tree.unlock_state(match)
        assert (tree.supersede(match) == match.state) == (not other)
        assert tree.match(array((1, 2, 3, 4))).length == (3 if other else 0)


def test_a_state_that_another_request_started_from_is_not_superseded() -> None:
    """Nor one whose tail is still being copied."""
    ledger = Ledger(2, True)
    ledger.offer((1, 2, 3, 4, 5, 6), (4,))
    match = ledger.tree.match(array((1, 2, 3, 4, 9)))
    ledger.tree.lock(match)
    assert ledger.tree.supersede(PrefixMatch(4, node=match.node)) is None, "it is being read"
    ledger.tree.unlock_state(match)
    assert ledger.tree.supersede(PrefixMatch(2, node=match.node)) is None
    ledger.offer((7, 8, 9), (3,))
    match = ledger.tree.match(array((7, 8, 9, 9)))
    ledger.tree.lock(match)
    assert match.tail is not None and ledger.tree.supersede(match) is None


def test_a_new_state_stays_until_its_conversation_may_come_back() -> None:
    """Its request has ended, and the next turn does not wait yet. This is not for states at the end of whole texts."""
    for position in (3, 4):
        ledger = Ledger(0, True)
        ledger.offer((1, 2, 3, 4), (position,))
        assert bool(ledger.tree.evict([], 1, new=NewState(3)).states) == (position == 4)
        if position == 3:
            for _ in range(RECENT):
                ledger.offer((9,))
            assert ledger.tree.evict([], 1, new=NewState(3)).states


def test_a_prompts_state_leaves_that_of_a_running_request_alone() -> None:
    """Otherwise each would lose its state to the next one before anyone comes back."""
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4), (4,))
    running = PrefixMatch(node=next(iter(ledger.tree.nodes())))
    ledger.tree.lock(running)
    assert not ledger.tree.evict([], 1, new=NewState(4)).states
    assert ledger.tree.evict([], 1, new=NewState(5)).states, "one that saves more"
    ledger.offer((1, 2, 3, 4), (4,))
    ledger.tree.unlock(running)
    assert ledger.tree.evict([], 1, new=NewState(4)).states


def test_a_request_that_awaits_a_state_does_not_await_a_later_one_above_it() -> None:
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4), (4,))
    ledger.tree.expect(array((1, 2, 3, 4, 5)), 8)
    ledger.offer((1, 2), (2,))
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(1, 2, 3, 4)}


def test_a_text_is_in_use_as_long_as_its_request_runs() -> None:
    """What came and went meanwhile does not make its state older. Afterwards it does."""
    ledger = Ledger(0, True)
    ledger.offer((1, 2, 3, 4), (4,))
    running = PrefixMatch(node=next(iter(ledger.tree.nodes())))
    ledger.tree.lock(running)
    for first in (6, 7, 8):
        ledger.offer((first, 0, 0), (3,))
        ledger.evict(0, 1)
    assert tokens_of(ledger) == {(1, 2, 3, 4)}
    assert not ledger.tree.evict([], 1, new=NewState(1)).states
    ledger.tree.unlock(running)
    ledger.offer((9, 0, 0), (3,))
    ledger.evict(0, 1)
    assert tokens_of(ledger) == {(9, 0, 0)}


def test_states_that_come_together_are_worth_what_their_number_leaves() -> None:
    """The first one counts for the share of its class as the last one does."""
    ledger = Ledger(0, True)
    ledger.offer((9,) * 6, (6,))  # the end of a text
    ledger.offer(tuple(range(100, 379)), tuple(range(8, 279, 30)))
    ledger.evict(0, 1)
    assert (9,) * 6 in tokens_of(ledger) and min(map(len, tokens_of(ledger) - {(9,) * 6})) == 38


ANSWERED = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def with_answer(ledger: Ledger) -> None:
    """A prompt of 3 tokens, whose answer has states after 5 and 7 of all and at its end."""
    within = dict.fromkeys((5, 7), StateKind.ANSWER)
    states = {place: ledger.slot() for place in (3, 5, 7, 9)}
    ledger.tree.insert(array(ANSWERED), NO_SETS, states, prompt=3, kinds=within)
    ledger.states |= {slot: ANSWERED[:place] for place, slot in states.items()}


def test_states_within_answers_go_first_the_oldest_before_the_others() -> None:
    ledger = Ledger(0, True)
    ledger.offer((7,), (1,))
    with_answer(ledger)
    gone = [ANSWERED[:5], ANSWERED[:7], (7,)]
    for text in gone:
        assert text in tokens_of(ledger)
        ledger.evict(0, 1)
        assert text not in tokens_of(ledger)
    ledger.check()


def test_a_new_state_within_an_answer_takes_the_place_of_no_other_kind() -> None:
    ledger = Ledger(0, True)
    with_answer(ledger)
    assert [len(ledger.tree.evict([], 1, new=NewState(0)).states) for _ in range(3)] == [1, 1, 0]


def test_behind_states_within_an_answer_that_at_its_end_still_passes_the_prompts() -> None:
    """The request has started from its prompt's state, as one does that was retracted. Nobody else needs that."""
    ledger = Ledger(0, True)
    ledger.offer((7,), (1,))
    ledger.offer(ANSWERED[:3], (3,))
    read(ledger, ANSWERED[:4])
    states = {place: ledger.slot() for place in (5, 9)}
    ledger.tree.insert(array(ANSWERED), NO_SETS, states, prompt=3, kinds={5: StateKind.ANSWER})
    ledger.states |= {slot: ANSWERED[:place] for place, slot in states.items()}
    ledger.evict(0, 2)
    assert tokens_of(ledger) == {(7,), ANSWERED}


@pytest.mark.parametrize("waits", [False, True])
def test_a_state_within_an_answer_that_a_request_needs_is_one_of_a_prompt(waits: bool) -> None:
    ledger = Ledger(0, True)
    with_answer(ledger)
    if waits:
        ledger.tree.expect(array((1, 2, 3, 4, 5, 6)), 4)
        ledger.tree.forget(4)
    else:
        read(ledger, (1, 2, 3, 4, 5, 6))
    ledger.evict(0, 1)
    assert ANSWERED[:5] in tokens_of(ledger) and ANSWERED[:7] not in tokens_of(ledger)
    assert not ledger.tree.evict([], 1, new=NewState(0)).states


@pytest.mark.parametrize(("kind", "gives_way"), [(StateKind.PROMPT, False), (StateKind.SPACED, True)])
def test_a_new_state_at_an_even_distance_gives_way_to_one_that_saves_less(kind: StateKind, gives_way: bool) -> None:
    """A prompt leaves many of them; other new states stay for a while."""
    tree = Ledger(0, True).tree
    tree.insert(array((1, 2, 3, 4, 5)), NO_SETS, {4: Handle(1, 0)}, kinds={4: kind})
    assert bool(tree.evict([], 1, new=NewState(2)).states) == gives_way
