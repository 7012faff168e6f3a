"""Prefixes with states on real tiny models: a request that starts from a cached state gets the tokens it gets alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache import answer_states, host_fetches
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheCounts
from hybridrt.runtime.step.plan import StepPlan
from tests.models.test_models_parity import prompts
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.cache_ledger import check_cache
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import drawn, sweep
from tests.support.samples import Samples
from tests.support.session import Session, budget
from tests.support.ties import check_greedy

MODELS = (
    "falcon-plain", "qwen-plain", "jamba-plain", "falcon_mamba-plain", "lfm2-plain", "zamba2-plain", "minimax-plain",
    "ling-plain", "ling25-plain", "lfm3-plain", "lara-plain",
)  # fmt: skip
RINGS = ("falcon-plain", "qwen-plain", "ling-plain", "lfm2-plain", "lara-plain")
TEXT = prompts(40, seed=5)[0]
MAX_LEN, PAGE, ROWS, PAGES, CACHE_SLOTS = 64, 4, 2, 26, 2
STARTS = (1, 4, 5, 8, 12, 13, 24)


@pytest.fixture(autouse=True, scope="module")
def states_within_answers_few_tokens_apart() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_states, "APART", 4)
        yield


def upload(arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


@dataclass(frozen=True)
class Turn:
    """A prompt: the text's first tokens, maybe with what the model answered to them, and one more token."""

    length: int
    answered: bool
    count: int
    sampled: bool
    arrives: int
    aborted: int | None


@dataclass
class Bench:
    checkpoints: CheckpointStore
    name: str
    sessions: dict[tuple[str, int], Session] = field(default_factory=dict)
    alone: dict[tuple[int, bool, bool], list[int]] = field(default_factory=dict)

    def session(self, mode: str, host: int = 0) -> Session:
        """`host`: bytes of main memory for prefixes."""
        key = mode if self.name in RINGS else "classic", host
        if key not in self.sessions:
            path = self.checkpoints[self.name].path
            config: dict[str, Any] = {"page_size": PAGE, "state_mode": key[0], "max_model_len": MAX_LEN}
            config |= {"host_cache_bytes": host, "prefix_cache": bool(host)}
            config["max_running_requests"] = ROWS
            bytes_ = budget(path, rows=ROWS, pages=PAGES, cache_slots=CACHE_SLOTS, **config)
            self.sessions[key] = Session(path, budget_bytes=bytes_, cache_slots=CACHE_SLOTS, **config)
            assert self.sessions[key].plan.num_slots == ROWS + CACHE_SLOTS
        return self.sessions[key]

    def prompt(self, turn: Turn) -> list[int]:
        """An answer of 8 tokens ends where a page ends if its prompt does, give or take the last one."""
        if not turn.answered:
            return TEXT[: turn.length]
        first = Turn(turn.length, False, 8, turn.sampled, 0, None)
        return [*TEXT[: turn.length], *self.tokens_alone(first), TEXT[0]]

    def tokens_alone(self, turn: Turn) -> list[int]:
        key = turn.length, turn.answered, turn.sampled
        if key not in self.alone:
            engine = self.session("classic").engine()
            engine.add_request(self.prompt(turn), params(turn, 14), "alone")
            samples = Samples()
            while engine.has_unfinished():
                samples.add(engine.step())
            self.alone[key] = samples["alone", 0].token_ids
        return self.alone[key][: turn.count]


def params(turn: Turn, count: int) -> SamplingParams:
    heat: dict[str, Any] = {"temperature": 0.9, "top_k": 20} if turn.sampled else {"temperature": 0.0}
    return SamplingParams(max_tokens=count, ignore_eos=True, seed=9, **heat)


@pytest.fixture(autouse=True)
def fetches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)


def spoil_slots(session: Session) -> None:
    """Garbage in all pages and slots: finite in KV, whose hidden entries are multiplied by zero."""
    for tensor in session.runner.pools.kv.tensors:
        tensor[:, 1:] = 1e4
    mamba = session.runner.pools.req_to_token.mamba_pool
    for layer_id in mamba.layer_ids if mamba is not None else ():
        for tensor in (mamba.layer_cache(layer_id).conv, mamba.layer_cache(layer_id).temporal):  # type: ignore[union-attr]
            tensor[1:] = torch.nan


@pytest.fixture(scope="module", params=sweep(MODELS, 4, thin=7))
def bench(request: pytest.FixtureRequest, checkpoints: CheckpointStore) -> Iterator[Bench]:
    yield Bench(checkpoints, request.param)


TURNS = st.builds(
    Turn,
    length=st.sampled_from(STARTS),
    answered=st.booleans(),
    count=st.sampled_from([1, 4, 5, 8, 9, 14]),
    sampled=st.booleans(),
    arrives=st.integers(0, 25),
    aborted=st.none() | st.none() | st.integers(0, 30),
)


def play(
    bench: Bench, turns: list[Turn], mode: str, chunk: int, overlap: bool, grid: int = 4, host: int = 0
) -> CacheCounts:
    session = bench.session(mode, host)
    wanted = [bench.tokens_alone(turn) for turn in turns]
    engine = session.engine(chunk=chunk, overlap=overlap, prefix_cache=True, grid=grid)
    session.plans.clear()
    samples = Samples()
    step = 0
    while step <= 30 or engine.has_unfinished():
        for i, turn in enumerate(turns):
            if turn.arrives == step:
                engine.add_request(bench.prompt(turn), params(turn, turn.count), str(i))
            if turn.aborted == step:
                engine.abort(str(i))
        if engine.has_unfinished():
            samples.add(engine.step())
        check_cache(session.coordinator)
        step += 1
        assert step < 2000
    session.assert_empty()
    for i, turn in enumerate(turns):
        out = samples[str(i), 0]
        assert out.error is None
        expected = wanted[i][: len(out.token_ids)] if out.finish_reason == "abort" else wanted[i]
        if out.token_ids != expected:
            assert not turn.sampled, f"sampled tokens differ: {turn}"
            oracle = bench.checkpoints[bench.name].logits(bench.prompt(turn), out.token_ids)
            check_greedy(out.token_ids, oracle, f"{bench.name} {turn}")
    return session.coordinator.prefixes.counts


@pytest.mark.parametrize(("bench", "examples"), drawn(MODELS, 8, 2, 3, 40, thin=4), indirect=["bench"])
def test_cached_tokens_equal_uncached_ones(bench: Bench, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        turns=st.lists(TURNS, min_size=2, max_size=8),
        mode=st.sampled_from(["classic", "replay", "replay"]),
        chunk=st.sampled_from([1, 5, 64]),
        overlap=st.booleans(),
        grid=st.sampled_from([4, 8, 16]),
        host=st.sampled_from([0, 200_000, 200_000]),
    )
    def schedule(**case: Any) -> None:
        play(bench, **case)

    schedule()


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_second_turn_comes_from_main_memory(bench: Bench, mode: str) -> None:
    """Everything was evicted from the device, and its pages and slots have held something else since."""
    turns = [Turn(24, answered, 8, False, 0, None) for answered in (False, True)]
    wanted = bench.tokens_alone(turns[1])
    session = bench.session(mode, 200_000)
    engine, found = session.engine(prefix_cache=True), Samples()
    for i, turn in enumerate(turns):
        engine.add_request(bench.prompt(turn), params(turn, 8), str(i))
        while engine.has_unfinished():
            found.add(engine.step())
        engine.add_request([3, 1, 4], params(turn, 4), f"between {i}")  # launches the copies
        while engine.has_unfinished():
            found.add(engine.step())
        session.coordinator.prefixes.evict([PAGES] * len(session.plan.groups), ROWS + CACHE_SLOTS)
        spoil_slots(session)
    assert found["1", 0].metrics.cached_tokens == engine.counters().cache_fetched == 31
    assert found["1", 0].token_ids == wanted


@pytest.mark.parametrize(("mode", "overlap"), sweep(product(["classic", "replay"], [False, True]), 3))
def test_a_second_turn_hits(bench: Bench, mode: str, overlap: bool) -> None:
    """The answer's last token is never computed: the state is that after 12 tokens, where a page ends."""
    turns = [Turn(5, answered, 8, False, arrives, None) for answered, arrives in ((False, 0), (True, 14))]
    counts = play(bench, turns, mode, 64, overlap)
    first = [row.computed for plan in bench.session(mode).plans for row in plan.extend][-1]
    assert (counts.hit, first) == (12, 12)


def test_a_donated_slot_may_hold_a_state_within_an_answer_in_the_same_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has given it up since. The donation fills the slot first, then copies to main memory have read it."""
    runner, done = bench.session("replay", 200_000).runner, list[Any]()
    pool = runner.pools.req_to_token.mamba_pool
    donation, copy = StateMove(1, 1, 1, When.FIRST), StateMove(2, 2, 1, When.BEFORE_ROWS)
    monkeypatch.setattr(pool, "move", lambda moves, _: done.append(moves))
    monkeypatch.setattr(runner.host, "launch", lambda _: done.append("launch"))
    monkeypatch.setattr(runner.host, "wait", lambda _: done.append("wait"))
    runner.launch(StepPlan(moves=[donation, copy]))
    assert done == [[donation], "launch", "wait", [copy]]


@pytest.mark.parametrize(("mode", "overlap"), sweep(product(["classic", "replay"], [False, True]), 3))
def test_a_history_that_leaves_an_answer_starts_within_it(bench: Bench, mode: str, overlap: bool) -> None:
    """Of 14 tokens after a prompt of 5 it keeps 9; the states are after 8 and 12 of all, the prompt's after 4."""
    first = Turn(5, False, 14, False, 0, None)
    history = [*TEXT[:5], *bench.tokens_alone(first)[:9], 7]
    session, found = bench.session(mode), {}
    for cached in (False, True):
        engine, samples = session.engine(prefix_cache=cached, grid=4, overlap=overlap), Samples()
        engine.add_request(TEXT[:5], params(first, 14), "first")
        while engine.has_unfinished():
            engine.step()
        engine.add_request(history, params(first, 8), "again")
        while engine.has_unfinished():
            samples.add(engine.step())
        check_cache(session.coordinator)
        found[cached] = samples["again", 0]
    assert found[True].metrics.cached_tokens == 12
    assert found[True].token_ids == found[False].token_ids


@torch.inference_mode()
@pytest.mark.parametrize(
    "name, mode", sweep([(name, "classic") for name in MODELS] + [(name, "replay") for name in RINGS], 3)
)
def test_a_row_continues_from_a_snapshot(name: str, mode: str, checkpoints: CheckpointStore) -> None:
    """Snapshot at 13 tokens, decode on, restore: the row decodes the same again, bit for bit. So does another row whose
    prompt starts from the snapshot's slot; it leaves that slot as it is."""
    hand = ByHand(checkpoints[name].path, mode=mode)
    hand.admit(2)
    hand.extend(Row(2, 0, TEXT[:9]))
    for i in range(9, 13):
        hand.decode(Row(2, i, TEXT[i : i + 1]))
    row, spare = torch.tensor([[2], [6]])
    state = hand.state(2, 13)
    hand.mamba.snapshot(row, spare)
    for i in range(13, 19):
        hand.decode(Row(2, i, [7]))
    hand.mamba.restore(spare, row)
    restored = hand.state(2, 13)
    assert_close(restored, state, 0.0)
    hand.mamba.move([StateMove(2, hand.slot(2), 6, When.BEFORE_ROWS)], upload)
    before = hand.snapshot()

    hand.admit(3)
    hand.pools.req_to_token.tables[3, :, :13] = hand.pools.req_to_token.tables[2, :, :13]
    reader = hand.batch((), [Row(3, 13, TEXT[13:15])])
    reader.read_state_slots = spare.int()
    logits = hand.forward(reader)
    touched = hand.touched(before)
    assert not any(6 in touched[f"{what} {i}"] for i in hand.mamba.layer_ids for what in ("conv", "temporal"))
    whole = ByHand(checkpoints[name].path, mode="classic")
    whole.admit(1)
    torch.testing.assert_close(logits, whole.extend(Row(1, 0, TEXT[:15]))[13:], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["falcon_mamba-plain", *RINGS])
def test_a_donated_slot_holds_the_whole_state(name: str, checkpoints: CheckpointStore) -> None:
    hand = ByHand(checkpoints[name].path, mode="replay" if name in RINGS else "classic")
    hand.admit(2, 4)
    hand.extend(Row(2, 0, TEXT[:9]), Row(4, 0, TEXT[:3]))
    for i in range(6):
        hand.decode(Row(2, 9 + i, TEXT[9 + i : 10 + i]), Row(4, 3 + i, [5]))
    wanted, neighbour, own = hand.state(2, 15), hand.state(4, 9), hand.slot(2)
    hand.mamba.move([StateMove(2, own, own, When.FIRST)], upload)
    assert hand.mamba.req_to_state_slot[2] == 0, "the row owns no slot any more"
    assert_close(hand.state(4, 9), neighbour, 0.0)
    for layer_id in hand.mamba.layer_ids:
        assert torch.equal(hand.mamba.layer_cache(layer_id).temporal[own], wanted[f"state of layer {layer_id}"])
    before = hand.snapshot()
    hand.mamba.move([StateMove(2, own, own, When.FIRST)], upload)
    assert not set().union(*hand.touched(before).values()), "again, as after a launch that failed: nothing happens"
