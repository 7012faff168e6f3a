"""Prefixes with states through the engine: tokens with a cache are those without, and no entry has two owners."""

from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import Span
from hybridrt.engine.cache import host_fetches, prefix_store
from hybridrt.engine.core import prompt_waiters
from hybridrt.engine.core.step_cost import StepCost
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.state_moves import When
from hybridrt.mem_cache.prefix_tree.radix_node import StateKind
from hybridrt.runtime.step import pack_padded
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from tests.engine.test_schedules import Abort, Add, Step, run_history
from tests.mem_cache.test_radix_cache import text_of
from tests.support.engine_harness import VOCAB, ByteTokenizer, Rig
from tests.support.levels import draw, examples
from tests.support.mock_executor import tokens_alone

TEXT = tokens_alone([5, 1, 2], 77, 40, VOCAB)


def rig_with_cache(*, rows: int = 2, slots: int = 5, pages: int = 40, page_size: int = 1, **config: Any) -> Rig:
    return Rig(rows=rows, slots=slots, pages=pages, page_size=page_size, cache=True, **config)


def computed(rig: Rig) -> list[int]:
    """First position of every chunk that was computed."""
    return [row.computed for plan in rig.executor.plans for row in plan.extend]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("slots, pages", [(5, 40), (5, 0), (0, 40)])
def test_a_second_turn_starts_where_the_first_ended(slots: int, pages: int, replay: bool) -> None:
    rig = rig_with_cache(slots=slots, pages=pages, replay=replay)
    first = [3, 1, 4]
    answer = rig.finish(first, max_tokens=4, ignore_eos=True, seed=1).token_ids
    assert answer == tokens_alone(first, 1, 4, VOCAB)
    second = [*first, *answer, 9, 8]
    again = rig.finish(second, max_tokens=3, ignore_eos=True, seed=2).token_ids
    assert again == tokens_alone(second, 2, 3, VOCAB)
    counts = rig.pools.prefixes.counts
    assert (counts.asked, counts.hit) == (len(first) + len(second), computed(rig)[-1])
    assert [rig.outputs[f"request-{i}", 0].metrics.cached_tokens for i in (0, 1)] == [0, counts.hit]
    assert computed(rig)[-1] in (6, 7), "the last token of the first turn may have been computed or not"
    read = [row.read_state_slot for plan in rig.executor.plans for row in plan.extend]
    assert read[0] == 0 and bool(read[-1]) == bool(slots)


def test_only_the_first_chunk_reads_the_caches_slot() -> None:
    rig = rig_with_cache(chunk=2)
    rig.finish(TEXT[:4], max_tokens=1, seed=1)
    rig.finish(TEXT[:9], max_tokens=1, seed=1)
    chunks = [(row.computed, row.read_state_slot > 0) for plan in rig.executor.plans for row in plan.extend]
    assert chunks == [(0, False), (2, False), (4, True), (6, False), (8, False)]


def test_the_caches_state_is_unlocked_once_the_first_chunk_has_been_consumed() -> None:
    rig = rig_with_cache(chunk=2, overlap=False)
    rig.finish(TEXT[:4], max_tokens=1, seed=1)
    rig.add(TEXT[:9], max_tokens=1, seed=1)
    rig.step()
    assert rig.pools.pages.num_locked and not rig.pools.slots.num_locked
    rig.run()


def test_what_a_retracted_request_donates_may_be_evicted_in_the_same_step() -> None:
    rig = rig_with_cache(rows=2, slots=4, pages=12, replay=True)
    for seed in (1, 2):
        rig.add(TEXT[:2], max_tokens=9, ignore_eos=True, seed=seed)
    rig.run()
    assert rig.engine.counters().retractions and any(plan.moves for plan in rig.executor.plans)
    for i, seed in enumerate((1, 2)):
        assert rig.outputs[f"request-{i}", 0].token_ids == tokens_alone(TEXT[:2], seed, 9, VOCAB)


def test_a_hit_does_not_wait_for_the_slot_that_it_has_locked_itself() -> None:
    """One slot in all, and the cache has it: the request takes it and computes everything."""
    rig = rig_with_cache(rows=1, slots=1)
    rig.finish(TEXT[:4], max_tokens=1, seed=1)
    assert rig.pools.slots.num_cached == 1
    rig.finish(TEXT[:9], max_tokens=1, seed=1)
    assert computed(rig) == [0, 0]


def test_what_the_device_computed_behind_the_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafts go on after an end that was not foreseen, they are part of the state: no text of the request leads
    to it."""
    monkeypatch.setattr(Request, "ends_within", lambda *_: False)
    for count in range(1, 12):
        rig = rig_with_cache(drafts=4, tokenizer=ByteTokenizer())
        prompt = [2, 7, 1]
        stop = chr(tokens_alone(prompt, 3, 12, VOCAB)[count - 1])
        text = [*prompt, *rig.finish(prompt, max_tokens=12, stop=stop, ignore_eos=True, seed=3).token_ids]
        for kept in map(text_of, rig.pools.prefixes.tree.nodes()):
            assert list(kept) == text[: len(kept)]
        rig.finish([*text, 5], max_tokens=3, seed=4, ignore_eos=True)
        assert list(rig.outputs.values())[-1].token_ids == tokens_alone([*text, 5], 4, 3, VOCAB)


@pytest.mark.parametrize("string", [False, True])
def test_drafts_never_go_on_behind_the_end_of_their_request(string: bool) -> None:
    """So the state after the answer is always that of its text, and a next turn computes its own tokens alone."""
    for count in range(1, 12):
        rig, prompt = rig_with_cache(drafts=4, tokenizer=ByteTokenizer()), [2, 7, 1]
        token = tokens_alone(prompt, 3, 12, VOCAB)[count - 1]
        stop: Any = {"stop": chr(token)} if string else {"stop_token_ids": (token,)}
        answer = rig.finish(prompt, max_tokens=12, ignore_eos=True, seed=3, **stop).token_ids
        rig.finish([*prompt, *answer, 5], max_tokens=1, seed=4)
        assert rig.pools.prefixes.counts.hit >= len(prompt) + len(answer) - 1


@pytest.mark.parametrize("late", [0, 1])
def test_nothing_of_a_failed_step_is_kept(late: int) -> None:
    rig = rig_with_cache(late=late)
    rig.executor.fail_result[0] = RuntimeError("no")
    rig.add(TEXT[:3], max_tokens=9, seed=1, ignore_eos=True)
    rig.run()
    assert rig.pools.slots.num_cached == rig.pools.pages.num_cached == 0


def test_nothing_of_a_failed_step_is_kept_of_a_request_that_was_aborted_before() -> None:
    rig = rig_with_cache(late=2)
    rig.executor.fail_result[0] = RuntimeError("no")
    rig.add(TEXT[:3], "r", max_tokens=9, seed=1, ignore_eos=True)
    rig.step()
    rig.engine.abort("r")
    rig.run()
    assert rig.pools.slots.num_cached == rig.pools.pages.num_cached == 0


def test_nothing_is_kept_of_a_state_that_gave_no_finite_logits() -> None:
    """The host reads that only after the abort."""
    rig = rig_with_cache(late=2)
    rig.executor.draw = lambda tenant: -1  # type: ignore[method-assign]
    rig.add(TEXT[:3], "r", max_tokens=9, seed=1, ignore_eos=True)
    rig.step()
    rig.engine.abort("r")
    rig.run()
    assert rig.pools.slots.num_cached == rig.pools.pages.num_cached == 0


def test_a_donation_outlives_a_launch_that_fails() -> None:
    rig = rig_with_cache(replay=True)
    rig.finish(TEXT[:4], max_tokens=3, ignore_eos=True, seed=1)
    number = len(rig.executor.plans)
    rig.executor.fail_launch[number] = RuntimeError("no")
    rig.add([1, 1], max_tokens=1, seed=1)
    rig.run()
    assert [move.when for move in rig.executor.plans[number].moves] == [When.FIRST]
    text = [*TEXT[:4], *rig.outputs["request-0", 0].token_ids, 6]
    assert rig.finish(text, max_tokens=4, ignore_eos=True, seed=5).token_ids == tokens_alone(text, 5, 4, VOCAB)
    assert computed(rig)[-1] > 0


def test_a_change_that_is_broken_off_empties_the_cache() -> None:
    rig = rig_with_cache()
    rig.finish(TEXT[:4], max_tokens=1, seed=1)
    rig.add(TEXT[:9], max_tokens=1, seed=1)
    tree = rig.pools.prefixes.tree
    insert, tree.insert = tree.insert, None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        rig.run()
    tree.insert = insert  # type: ignore[method-assign]
    rig.run()
    assert not [*tree.nodes()] and rig.pools.slots.num_free == rig.pools.slots.total
    assert not rig.pools.donations


turns = st.builds(
    Add,
    st.builds(lambda n, extra: TEXT[:n] + extra, st.integers(1, 24), st.lists(st.integers(0, VOCAB - 1), max_size=2)),
    st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([1, 1, 2, 5, 12]),
        ignore_eos=st.sampled_from([True, True, False]),
        stop_token_ids=st.sampled_from([(), (3,)]),
        seed=st.sampled_from([77, 78]),  # the text continues as that of 77
        n=st.sampled_from([1, 1, 2]),
    ),
)
others = st.one_of(st.builds(Step, st.integers(1, 9)), st.builds(Abort, st.integers(0, 9)))
cache_rigs = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 4),
        "slots": st.sampled_from([0, 1, 2, 4, 7]),
        "pages": st.sampled_from([0, 40, 44, 80]),
        "page_size": st.sampled_from([1, 2, 4]),
        "grid": st.sampled_from([4, 8, 16]),
        "chunk": st.integers(1, 12),
        "late": st.integers(0, 3),
        "overlap": st.booleans(),
        "drafts": st.sampled_from([0, 0, 1, 4]),
        "replay": st.booleans(),
        "host": st.sampled_from([None, (60, 9), (12, 3)]),
        "copy_delay": st.sampled_from([0, 1, 6]),
    }
).filter(lambda config: config["slots"] or config["pages"])


@pytest.fixture(autouse=True)
def fetches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)


@examples(20, 200)
def test_cached_tokens_equal_uncached_ones(examples: int) -> None:
    """Hits, retraction, aborts and eviction in any order; the ledgers are compared after every step."""
    histories = st.lists(st.one_of(turns, turns, others), min_size=6, max_size=14)
    draw(examples, play, cache_rigs, histories, suppress_health_check=[HealthCheck.too_slow])


def play(config: dict, history: list[Add | Step | Abort]) -> None:
    rig = rig_with_cache(max_model_len=40, **config)
    added = run_history(rig, history)
    assert len(added) == sum(isinstance(event, Add) for event in history), "none is refused"


def test_a_prompt_leaves_a_state_on_the_grid_without_a_step_more() -> None:
    rig = rig_with_cache(grid=4)
    rig.finish(TEXT[:11], max_tokens=1, ignore_eos=True, seed=1)
    assert [row.saves for plan in rig.executor.plans for row in plan.extend] == [[(8, 2)]]
    rig.finish([*TEXT[:9], 5, 6, 7], max_tokens=1, seed=1)
    assert computed(rig) == [0, 8]


def test_where_another_prompt_leaves_the_path_a_state_is_kept() -> None:
    """KV matches deeper than any state: the second prompt that comes by leaves one, the third hits."""
    rig = rig_with_cache(grid=2, slots=8, chunk=40)
    for end in range(3):
        rig.finish([*TEXT[:7], *([end] * 9)], max_tokens=1, ignore_eos=True, seed=1)
    assert computed(rig) == [0, 0, 6]
    counts = rig.pools.prefixes.counts
    assert (counts.asked, counts.hit, counts.without_state) == (48, 6, 8)


def test_where_a_waiting_prompt_will_leave_the_path_a_state_is_kept() -> None:
    """The first prompt leaves it, because the others are known."""
    rig = rig_with_cache(rows=1, grid=2, slots=3, chunk=40)
    for end in range(3):
        rig.add([*TEXT[:7], *([end] * 9)], f"{end}", max_tokens=1, ignore_eos=True, seed=1)
    rig.run()
    assert computed(rig) == [0, 6, 6]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("chunk", [4, 40])
def test_a_later_state_of_a_conversation_takes_the_slot_of_the_earlier_one(replay: bool, chunk: int) -> None:
    """With one slot for the cache. The step that leaves the later state there reads the earlier one before it, or an
    earlier step has read it."""
    rig = rig_with_cache(rows=1, grid=4, slots=2, chunk=chunk, replay=replay)
    for number, end in enumerate((6, 14, 22)):
        prompt = [*TEXT[:22], 7][:end]
        answer = rig.finish(prompt, max_tokens=3, ignore_eos=True, seed=number).token_ids
        assert answer == tokens_alone(prompt, number, 3, VOCAB)
    assert [rig.outputs[f"request-{i}", 0].metrics.cached_tokens for i in range(3)] == [0, 4, 12]


def test_a_state_takes_no_slot_that_a_waiting_request_needs() -> None:
    """It would evict what another one waits for."""
    rig = rig_with_cache(rows=2, grid=4, slots=4, chunk=40)
    rig.finish(TEXT[:6], max_tokens=1, ignore_eos=True, seed=1)
    rig.finish([5] * 6, max_tokens=1, ignore_eos=True, seed=1)
    rig.add([8] * 9, max_tokens=1, ignore_eos=True, seed=1)
    rig.add([*TEXT[:6], 1], max_tokens=1, ignore_eos=True, seed=1)
    rig.add([*[5] * 6, 1], max_tokens=1, ignore_eos=True, seed=1)
    rig.run()
    assert [rig.outputs[f"request-{i}", 0].metrics.cached_tokens for i in range(2, 5)] == [0, 6, 6]


def test_marked_boundaries_leave_states() -> None:
    rig = rig_with_cache(grid=2, slots=9, chunk=40)
    rig.add(TEXT[:15], "r", max_tokens=1, seed=1)
    rig.engine._samples.samples_of_request("r")[0].boundaries = [3, 9]
    rig.run()
    assert [end for end, _ in rig.executor.plans[0].extend[0].saves] == [2, 8, 14]


def test_the_last_images_leave_states() -> None:
    """After marked boundaries, and not between images that are close to each other. Three states at most."""
    rig = rig_with_cache(grid=2, slots=9, pages=99, chunk=40)
    for name, boundaries, wanted in (("a", [], [10, 18, 30]), ("b", [4], [4, 18, 30])):
        rig.add(TEXT[:32], name, max_tokens=1, seed=1, cache_salt=name)
        (request,) = rig.engine._samples.samples_of_request(name)
        request.boundaries = boundaries
        request.spans = [Span(start, 2, b"", (1, 2), None) for start in (1, 8, 13, 16)]  # type: ignore[arg-type]
        rig.run()
        assert [end for end, _ in rig.executor.plans[-1].extend[0].saves] == wanted


def test_a_chunk_does_not_end_where_a_state_is_saved() -> None:
    rig = rig_with_cache(grid=4, chunk=8)
    rig.finish(TEXT[:11], max_tokens=1, ignore_eos=True, seed=1)
    rows = [(len(row.tokens), [end for end, _ in row.saves]) for plan in rig.executor.plans for row in plan.extend]
    assert rows == [(7, []), (4, [1])]


@pytest.mark.parametrize(
    ("saves", "chunk", "graph", "rows"),
    [
        # The boundary and a place at an even distance; one where the chunk ends; the prompt's last one.
        (StateSaves.AT_CHUNKS, 18, 40, [(18, [4, 12]), (18, [16]), (3, [2])]),
        # Without a graph one state, that at the boundary. The next chunk ends after 36: the rest has a graph.
        (StateSaves.AT_CHUNKS, 30, 3, [(30, [4]), (7, [6]), (2, [1])]),
        # The chunk ends after the boundary; the next state stands where few tokens of the chunk follow.
        (StateSaves.SECOND_PASS, 18, 40, [(5, [4]), (18, [17]), (16, [15])]),
    ],
)
def test_chunks_save_what_graphs_can_save(
    saves: StateSaves, chunk: int, graph: int, rows: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy has states every 12 tokens, and the prompt a boundary after 4."""
    monkeypatch.setattr(prefix_store, "SPACED", 12)
    monkeypatch.setattr(pack_padded, "TAIL", 2)
    policy = TrafficPolicy(cost=StepCost([Bucket(0, graph)], saves))
    rig = rig_with_cache(grid=2, slots=12, chunk=chunk, policy=policy)
    rig.add(TEXT[:39], "r", max_tokens=1, seed=1)
    rig.engine._samples.samples_of_request("r")[0].boundaries = [4]
    rig.run()
    found = [(len(row.tokens), [end for end, _ in row.saves]) for plan in rig.executor.plans for row in plan.extend]
    assert found == rows and not rig.pools.slots.num_used


@pytest.mark.parametrize("saves", [StateSaves.AT_CHUNKS, StateSaves.SECOND_PASS])
def test_chunks_as_long_as_the_even_distance_leave_its_states(
    saves: StateSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next chunk could not leave them. A chunk of one place on the grid leaves none."""
    monkeypatch.setattr(prefix_store, "SPACED", 12)

    def chunks(size: int) -> list[tuple[int, list[int]]]:
        rig = rig_with_cache(grid=2, slots=24, chunk=size, policy=TrafficPolicy(cost=StepCost([Bucket(0, 40)], saves)))
        rig.finish(TEXT[:39], max_tokens=1, seed=1)
        return [(len(row.tokens), [end for end, _ in row.saves]) for plan in rig.executor.plans for row in plan.extend]

    assert chunks(12)[:3] == [(12, [10]), (12, [10]), (12, [10])]
    assert chunks(2)[5:8] == [(2, []), (2, []), (2, [])]


def spaced_rig(monkeypatch: pytest.MonkeyPatch, slots: int, chunk: int = 80) -> Rig:
    """A policy has states every 12 tokens; states of 12 other texts have been in the cache."""
    monkeypatch.setattr(prefix_store, "SPACED", 12)
    rig = rig_with_cache(rows=2, grid=2, slots=slots, pages=500, chunk=chunk, policy=TrafficPolicy())
    for i in range(12):
        rig.finish([i, *range(8)], max_tokens=2, ignore_eos=True, seed=i)
    return rig


def visit(rig: Rig, text: int, own: int) -> int:
    """Tokens of a prompt that were cached: 37 of a text, and 5 that no other prompt has."""
    prompt = [text, *TEXT[:36], *[own] * 5]
    return rig.finish(prompt, max_tokens=2, ignore_eos=True, seed=own).metrics.cached_tokens


def test_states_at_even_distances_stay_in_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of later prompts replace what is worth less, not the earlier ones. One that was used stays, too."""
    rig, texts = spaced_rig(monkeypatch, slots=18), range(12, 16)
    assert [visit(rig, text, 1) for text in texts] == [0, 0, 0, 0]
    assert [visit(rig, text, 2) for text in texts] == [36, 36, 36, 36]
    assert [visit(rig, text, 3) for text in texts] == [36, 36, 36, 36]


def test_a_chunk_that_is_cut_so_far_that_it_has_a_graph_keeps_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after 12, so that the rest has a graph, and then after 4, where few tokens may follow."""
    monkeypatch.setattr(prefix_store, "SPACED", 12)
    monkeypatch.setattr(pack_padded, "TAIL", 2)
    policy = TrafficPolicy(cost=StepCost([Bucket(0, 20)], StateSaves.SECOND_PASS))
    rig = rig_with_cache(grid=2, slots=12, chunk=30, policy=policy)
    rig.add(TEXT[:39], "r", max_tokens=1, seed=1)
    rig.engine._samples.samples_of_request("r")[0].boundaries = [4, 20]
    rig.run()
    first = rig.executor.plans[0].extend[0]
    assert (len(first.tokens), [end for end, _ in first.saves]) == (5, [4])


@pytest.mark.parametrize(("boundaries", "saves"), [([4], [4]), ([], [24])])
def test_without_graphs_no_chunk_is_cut_for_them(
    boundaries: list[int], saves: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no state stands where few tokens follow."""
    monkeypatch.setattr(prefix_store, "SPACED", 12)
    monkeypatch.setattr(pack_padded, "TAIL", 2)
    policy = TrafficPolicy(cost=StepCost([], StateSaves.SECOND_PASS))
    rig = rig_with_cache(grid=2, slots=12, chunk=30, policy=policy)
    rig.add(TEXT[:39], "r", max_tokens=1, seed=1)
    rig.engine._samples.samples_of_request("r")[0].boundaries = boundaries
    rig.run()
    found = [(len(row.tokens), [end for end, _ in row.saves]) for plan in rig.executor.plans for row in plan.extend]
    assert found == [(30, saves), (9, [8])]


@pytest.mark.parametrize("slots", [4, 5, 6, 8])
def test_states_at_even_distances_leave_a_slot_for_the_prompts_end(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = spaced_rig(monkeypatch, slots, chunk=13)
    text = [12, *TEXT, *TEXT[:10]]
    rig.finish(text, max_tokens=2, ignore_eos=True, seed=1)
    assert rig.finish([*text, 3], max_tokens=1, ignore_eos=True, seed=2).metrics.cached_tokens == len(text) // 2 * 2


def test_a_prompt_that_was_aborted_has_no_state_at_an_even_distance() -> None:
    rig = rig_with_cache(chunk=20)
    rig.add(TEXT[:39], "r", max_tokens=1, seed=1)
    rig.step()
    rig.engine.abort("r")
    rig.run()
    assert [node.kind for node in rig.pools.prefixes.tree.nodes() if node.state is not None] == [StateKind.END]


def test_who_waits_for_a_state_at_an_even_distance_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the step turns out to have no graph, which saves one state."""
    monkeypatch.setattr(prefix_store, "SPACED", 12)
    monkeypatch.setattr(prompt_waiters, "LEAST_SHARED", 3)
    policy = TrafficPolicy(cost=StepCost([Bucket(0, 3)]))
    rig = rig_with_cache(rows=6, grid=2, slots=24, pages=200, chunk=40, policy=policy)
    for name, own in (("leader", 39), ("36", 36), ("34", 34), ("27", 27)):
        rig.add([*TEXT[:own], *[own % 7] * 3], name, max_tokens=1, ignore_eos=True, seed=1)
    rig.run()
    held = {name: output.metrics.cached_tokens for (name, _), output in rig.outputs.items()}
    assert held["27"] >= 24, held


def test_states_at_even_distances_give_way_while_they_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt leaves a state at its end that saves less than they do."""
    rig = spaced_rig(monkeypatch, slots=6)
    assert visit(rig, 12, 1) == 0
    short = [13, 9, 8, 7, 6]
    rig.finish(short, max_tokens=2, ignore_eos=True, seed=1)
    assert rig.finish([*short, 3], max_tokens=1, ignore_eos=True, seed=2).metrics.cached_tokens == 4


def test_samples_of_a_prompt_wait_for_the_first_and_start_from_its_state() -> None:
    rig = rig_with_cache(rows=4, slots=8, grid=4, chunk=40)
    rig.add(TEXT[:11], n=3, max_tokens=4, ignore_eos=True, seed=1)
    rig.add([4, 4], "other", max_tokens=1, seed=1)
    rig.step()
    assert computed(rig) == [0, 0], "who comes behind them does not wait"
    rig.run()
    assert computed(rig) == [0, 0, 8, 8]


def test_a_short_prompt_of_several_samples_waits_for_nothing() -> None:
    rig = rig_with_cache(rows=4, slots=8, grid=4)
    rig.add(TEXT[:4], n=3, max_tokens=4, ignore_eos=True, seed=1)
    rig.step()
    assert computed(rig) == [0, 0, 0]
    rig.run()


def test_a_prompt_is_shared_while_its_request_decodes() -> None:
    rig = rig_with_cache(grid=4, slots=8, chunk=40)
    rig.add(TEXT[:9], "long", max_tokens=30, ignore_eos=True, seed=1)
    rig.step()
    rig.step()
    rig.add(TEXT[:11], "late", max_tokens=1, seed=1)
    rig.step()
    assert computed(rig) == [0, 8] and rig.engine.counters().running == 2
    rig.run()


def test_of_two_equal_prompts_at_once_each_keeps_its_pages() -> None:
    rig = rig_with_cache(grid=4, slots=8, chunk=40)
    for name in "ab":
        rig.add(TEXT[:9], name, max_tokens=3, ignore_eos=True, seed=1)
    rig.run()
    assert computed(rig) == [0, 0]


def test_a_salt_hides_a_prompt() -> None:
    rig = rig_with_cache(grid=4, chunk=40)
    for salt in ("a", "b", None, "a"):
        rig.finish(TEXT[:9], max_tokens=1, ignore_eos=True, seed=1, cache_salt=salt)
    assert computed(rig) == [0, 0, 0, 8]


def test_states_of_the_cache_make_no_request_wait() -> None:
    """Saves take slots only while as many stay free, or can be made free, as there are free rows."""
    rig = rig_with_cache(rows=3, slots=4, grid=2, chunk=40)
    for i in range(3):
        rig.add([i, *TEXT[:9]], max_tokens=9, ignore_eos=True, seed=1)
    rig.step()
    assert rig.engine.counters().running == 3
    assert sum(len(row.saves) for row in rig.executor.plans[0].extend) == 1
    rig.run()


def test_a_tail_is_copied_into_a_page_of_its_own() -> None:
    rig = rig_with_cache(page_size=4, slots=8, chunk=40)
    text = [*TEXT[:6], *rig.finish(TEXT[:6], max_tokens=2, ignore_eos=True, seed=77).token_ids, 4]
    for seed in (3, 4):
        rig.finish(text, max_tokens=6, ignore_eos=True, seed=seed)
    assert computed(rig) == [0, 7, 7]
    copies = [copy for plan in rig.executor.plans for copy in plan.page_copies]
    assert (
        len(copies) == 2
        and len({page for copy in copies for page in (*copy.sources.tolist(), *copy.targets.tolist())}) == 3
    )


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    rig = Rig(page_size=1)
    rig.finish(TEXT[:20], max_tokens=2, seed=1)
    assert not [*rig.pools.prefixes.tree.nodes()] and rig.engine.counters().free_pages == 64


def test_what_the_device_has_evicted_comes_back_from_main_memory() -> None:
    rig = rig_with_cache(grid=4, slots=8, chunk=40, host=(60, 9))
    first = rig.finish(TEXT[:12], max_tokens=4, ignore_eos=True, seed=77).token_ids
    text = [*TEXT[:12], *first, 5]
    rig.pools.prefixes.evict([99], 99)
    assert rig.finish(text, max_tokens=6, ignore_eos=True, seed=3).token_ids == tokens_alone(text, 3, 6, VOCAB)
    assert computed(rig) == [0, 15]
    counters = rig.engine.counters()
    assert (counters.cache_hit, counters.cache_fetched) == (15, 15)
    assert counters.host_pages >= 15 and counters.host_states >= 2
    dump = rig.engine.cache_dump()
    assert (dump.host_pages, dump.host_states_total, dump.fetched) == (counters.host_pages, 9, 15)


def test_only_what_the_device_lacks_is_fetched() -> None:
    """Its KV is there, its state is not."""
    rig = rig_with_cache(grid=4, slots=8, chunk=40, host=(60, 9))
    rig.finish(TEXT[:13], max_tokens=1, ignore_eos=True, seed=77)
    rig.pools.prefixes.evict([0], 99)
    rig.finish([*TEXT[:13], 5], max_tokens=1, ignore_eos=True, seed=3)
    (fetched,) = [copy for plan in rig.executor.plans for copy in plan.host_copies if copy.fetch]
    assert (fetched.pages, len(fetched.states), computed(rig)) == ([[]], 1, [0, 13])


def test_others_run_while_a_prefix_is_fetched() -> None:
    rig = rig_with_cache(rows=3, grid=4, slots=9, chunk=40, host=(60, 9), copy_delay=6)
    rig.finish(TEXT[:13], max_tokens=1, ignore_eos=True, seed=77)
    rig.pools.prefixes.evict([99], 99)
    rig.add([1, 2, 3], "runs", max_tokens=30, ignore_eos=True, seed=1)
    rig.add([*TEXT[:13], 5], "fetches", max_tokens=1, ignore_eos=True, seed=3)
    rig.add([4, 4], "behind", max_tokens=1, ignore_eos=True, seed=4)
    for _ in range(5):
        rig.step()
    assert "behind" in {name for name, _ in rig.outputs} and rig.engine.counters().waiting == 1
    (fetched,) = [copy.ticket for plan in rig.executor.plans for copy in plan.host_copies if copy.fetch]
    assert all(plan.after_copies < fetched for plan in rig.executor.plans)
    rig.run()
    waited = [plan for plan in rig.executor.plans if plan.after_copies == fetched]
    assert waited and waited[0].admissions, "on other ranks the copy may still run"
    assert computed(rig)[-1] == 13 and rig.engine.counters().cache_fetched == 13


def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fetches, "PATIENCE_S", 0.0)
    rig = rig_with_cache(grid=4, slots=8, chunk=40, host=(60, 9), copy_delay=10**9)
    rig.finish(TEXT[:13], max_tokens=1, ignore_eos=True, seed=77)
    rig.pools.prefixes.evict([99], 99)
    rig.finish([*TEXT[:13], 5], max_tokens=2, ignore_eos=True, seed=3)
    assert computed(rig) == [0, 0]


def test_a_running_request_takes_back_what_a_fetch_owns() -> None:
    """Its pages count first; the step that writes them waits for the copies."""
    rig = rig_with_cache(rows=2, grid=4, slots=8, pages=20, chunk=40, host=(60, 9), copy_delay=10**9)
    rig.finish(TEXT[:13], max_tokens=1, ignore_eos=True, seed=77)
    rig.pools.prefixes.evict([99], 99)
    rig.add([1, 2, 3], "runs", max_tokens=17, ignore_eos=True, seed=1)
    rig.step()
    rig.add([*TEXT[:13], 5], "fetches", max_tokens=1, ignore_eos=True, seed=3)
    while rig.engine.counters().running:
        rig.step()
    rig.executor.copy_delay = 0
    rig.run()
    assert rig.engine.counters().retractions == 0 and any(plan.after_copies for plan in rig.executor.plans)
    assert rig.outputs["runs", 0].token_ids == tokens_alone([1, 2, 3], 1, 17, VOCAB)
    assert rig.outputs["fetches", 0].token_ids == tokens_alone([*TEXT[:13], 5], 3, 1, VOCAB)


def test_a_step_waits_for_copies_of_what_it_overwrites() -> None:
    """Everything that the first request leaves is evicted in the step that copies it to main memory."""
    rig = rig_with_cache(rows=1, grid=4, slots=2, pages=16, chunk=40, host=(60, 9), copy_delay=10**9)
    rig.finish(TEXT[:13], max_tokens=2, ignore_eos=True, seed=77)
    rig.finish([9] * 15, max_tokens=1, ignore_eos=True, seed=1)
    assert rig.executor.plans[-1].after_copies
    rig.executor.copy_delay = 0
    rig.finish([*TEXT[:13], 5], max_tokens=2, ignore_eos=True, seed=3)
    assert rig.engine.counters().cache_fetched == 12


def test_after_a_launch_that_failed_main_memory_holds_nothing() -> None:
    rig = rig_with_cache(grid=4, slots=8, chunk=40, host=(60, 9))
    rig.finish(TEXT[:13], max_tokens=1, ignore_eos=True, seed=77)
    rig.executor.fail_launch[len(rig.executor.plans)] = RuntimeError("no")
    rig.add([1, 1], max_tokens=1, seed=1)
    rig.run()
    assert rig.engine.counters().host_pages == rig.engine.counters().host_states == 0
    rig.finish([*TEXT[:13], 5], max_tokens=2, ignore_eos=True, seed=3)
    assert rig.engine.counters().host_pages


def test_forgetting_prefixes_empties_main_memory_too() -> None:
    rig = rig_with_cache(grid=4, slots=8, chunk=40, host=(60, 9), copy_delay=10**9)
    rig.finish(TEXT[:13], max_tokens=1, ignore_eos=True, seed=77)
    rig.pools.prefixes.evict([99], 99)
    rig.add([*TEXT[:13], 5], max_tokens=2, ignore_eos=True, seed=3)
    rig.step()
    assert rig.pools.fetches and rig.engine.reset_prefix_cache() and not rig.pools.fetches
    rig.run()
    assert computed(rig) == [0, 0]
