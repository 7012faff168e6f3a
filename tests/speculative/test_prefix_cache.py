"""Text with cached prefixes equals text without, token for token, whatever drafts, ends, is retracted or evicted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache import host_fetches
from hybridrt.engine.request.sample_request import Request
from hybridrt.parallel.rank_start import start_ranks
from hybridrt.parallel.ranks import Ranks
from hybridrt.speculative import draft_model
from hybridrt.speculative.drafter import AdaptiveDrafter
from tests.speculative.test_schedules import SCRIPTS, WITH_HEADS, Rigs, filters, make_drafter
from tests.support.checkpoints import VOCAB
from tests.support.levels import drawn
from tests.support.samples import Samples
from tests.support.speculation import LENGTH, PAGE, Ask, Letters, Rig, assert_same, sample_seed

# (model, how states are kept, drafts at one place, drafter); None: no drafter.
CELLS = [
    ("mamba2", "replay", 1, "scripted"), ("gdn", "replay", 1, "mtp"), ("mamba1", "classic", 1, None),
    ("mamba2", "replay", 1, None), ("gdn", "intermediate", 3, "scripted"), ("mamba2", "intermediate", 1, "ngram"),
    ("attention-free", "classic", 1, None), ("gdn", "replay", 1, "other"), ("mamba2", "intermediate", 3, "mtp"),
    ("gdn", "classic", 1, None), ("gdn", "replay", 1, None), ("mamba2", "classic", 1, None),
    ("mamba1", "intermediate", 1, "scripted"), ("mamba1", "intermediate", 3, "scripted"),
    ("attention-free", "intermediate", 1, "scripted"), ("attention-free", "intermediate", 3, "ngram"),
    ("gdn", "replay", 1, "ngram"), ("gdn", "replay", 1, "scripted"), ("gdn", "intermediate", 1, "mtp"),
    ("gdn", "intermediate", 3, "other"), ("mamba2", "replay", 1, "mtp"), ("mamba2", "replay", 1, "ngram"),
    ("mamba2", "intermediate", 3, "ngram"), ("mamba2", "intermediate", 1, "other"), ("attention", "classic", 1, None),
    ("attention", "intermediate", 1, "ngram"),
]  # fmt: skip
ON_TWO = [
    ("gdn", "intermediate", 3, "scripted"), ("gdn", "replay", 1, None), ("gdn", "replay", 1, "mtp"),
    ("mamba2", "replay", 1, "ngram"), ("mamba2", "replay", 1, "other"),
]  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A request that continues an earlier one: `kept` of its tokens, answer included, then tokens of its own."""

    parent: int | None
    kept: int
    own: tuple[int, ...]
    params: SamplingParams
    arrival: int
    abort: int | None


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """A random tree of requests that mostly come when their parents have ended, but may come at any time."""
    turns: list[Turn] = []
    arrival = 0
    for i in range(draw(st.integers(2, 7), "requests")):
        fields: dict[str, Any] = draw(filters, "filters")
        stops = draw(st.lists(st.integers(0, 130), max_size=9), "stop")
        if draw(st.booleans(), "of text"):
            fields = fields | {"stop": [*Letters().decode(stops)]}
        else:
            fields = fields | {"stop_token_ids": stops}
        params = SamplingParams(
            max_tokens=draw(st.sampled_from([1, 3, 8, 13, 20]), "max_tokens"), seed=100 * i, ignore_eos=True,
            n=draw(st.sampled_from([1, 1, 1, 2]), "n"), **fields,
        )  # fmt: skip
        parent = draw(st.integers(0, i - 1), "parent") if i and draw(st.sampled_from([True, True, False])) else None
        own = draw(st.lists(st.integers(3, 130), min_size=1, max_size=30 if parent is None else 6), "own")
        arrival += draw(st.sampled_from([0, 1, 2, 9, 25]), "after")
        abort = draw(st.sampled_from([None, None, None, 1, 2, 7]), "abort")
        kept = draw(st.integers(1, 60), "kept")
        turns.append(Turn(parent, kept, tuple(own), params, arrival, abort))
    return turns


PLAYS: dict[str, Any] = {
    "turns": conversations(), "chunk": st.sampled_from([3, 11, 8192, 8192]), "overlap": st.booleans(),
    "grid": st.sampled_from([PAGE, PAGE, 2 * PAGE, 16]), "script": st.sampled_from(sorted(SCRIPTS)),
    "hosted": st.booleans(), "foreseen": st.booleans(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fetches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)


class Bench:
    """Rigs with a prefix cache, and what requests become without one."""

    def __init__(self, rigs: Rigs) -> None:
        self.rigs = rigs
        self.rig = cache(self.new_rig)

    def new_rig(
        self, name: str, mode: str, topk: int, method: str | None, pages: int | None, slots: int,
        ranks: Ranks | None = None,
    ) -> Rig:  # fmt: skip
        drafts = 0 if method is None else 4
        spec: dict[str, Any] = {"method": "ngram", "topk": topk} if drafts else {}
        if method == "mtp":
            spec["method"] = "mtp"
        if method == "other":
            spec |= {"method": "draft", "draft_model": str(self.rigs.path("attention", 0))}
        return Rig(self.rigs.path(name), mode=mode, drafts=drafts, pages=pages, cache_slots=slots, ranks=ranks, **spec)

    def asks(self, name: str, turns: list[Turn]) -> list[Ask]:
        """The turns as prompts. What a parent has answered is what it answers alone."""
        found: list[Ask] = []
        for turn in turns:
            prompt = list(turn.own)
            if turn.parent is not None:
                before = found[turn.parent]
                answer = self.rigs.plain(name).futures([before])["0", 0].token_ids
                prompt = [*before.prompt, *answer][: turn.kept] + prompt
            prompt = prompt[: LENGTH - 1 - (turn.params.max_tokens or 0)]
            found.append(Ask(prompt, turn.params, turn.arrival, turn.abort))
        return found

    def play(
        self, rig: Rig, model: str, method: str | None, turns: list[Turn], chunk: int, grid: int, overlap: bool,
        script: str, hosted: bool, foreseen: bool,
    ) -> int:  # fmt: skip
        """Compares each request with what it becomes without a cache. Unless ends are foreseen, drafts go on after
        them. Returns how many tokens were hit."""
        rig.grid, rig.hosted = grid, hosted
        asks = self.asks(model, turns)
        plain = self.rigs.plain(model)
        futures = plain.futures(asks)
        by_seed = {sample_seed(asks[int(i)], k): output.token_ids for (i, k), output in futures.items()}
        drafter = None if method is None else make_drafter(rig, script if method == "scripted" else method, by_seed)
        with nullcontext() if foreseen else patch.object(Request, "ends_within", lambda *_: False):
            found = rig.run(asks, drafter, chunk, overlap)
        assert_same(asks, found, futures, plain.tied)
        return rig.counters.cache_hit


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = start_ranks(2, "cpu")
    yield started
    started.close()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(Rigs(tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize(("name", "mode", "topk", "method", "examples"), drawn(CELLS, 6, 2, 3, 40, thin=3))
def test_cached_equals_uncached(
    name: str, mode: str, topk: int, method: str | None, examples: int, bench: Bench
) -> None:
    """Stops inside accepted drafts, aborts in flight, tiny pools; the ledgers are compared after every step."""
    model, hits = WITH_HEADS[name] if method == "mtp" else name, 0

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(slots=st.sampled_from([0, 2, 9]), pages=st.sampled_from([None, None, 5]), **PLAYS)
    def play(slots: int, pages: int | None, **case: Any) -> None:
        nonlocal hits
        rig = bench.rig(model, mode, topk, method, pages, slots)
        hits += bench.play(rig, model, method, **case)

    play()
    assert hits > 2 * examples, "tokens that needed no computing"


def chat() -> list[Turn]:
    """A conversation of four turns, each after the last one's answer."""
    turns = []
    for i in range(4):
        own = tuple(range(3, 7 if i else 23))
        params = SamplingParams(max_tokens=8, temperature=0.0, seed=100 * i, ignore_eos=True)
        turns.append(Turn(i - 1 if i else None, 60, own, params, 40 * i, None))
    return turns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "topk", "method"),
    [pytest.param(*each, marks=pytest.mark.soak if i not in (0, 2) else ()) for i, each in enumerate(ON_TWO)],
)
def test_cached_equals_uncached_on_two_ranks(
    name: str, mode: str, topk: int, method: str | None, bench: Bench, ranks: Ranks
) -> None:
    """The same, with states and pages cut over two processes."""
    model, examples = WITH_HEADS[name] if method == "mtp" else name, 3
    rig = bench.new_rig(model, mode, topk, method, None, 9, ranks)
    plenty, counts = rig.lent[0][0], Counter[str]()
    hosted: dict[str, Any] = {"chunk": 8192, "overlap": True, "grid": PAGE, "script": sorted(SCRIPTS)[0]}
    hosted |= {"hosted": True, "foreseen": True}

    @example(slots=9, pages=plenty, turns=chat(), **hosted)
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(slots=st.sampled_from([2, 9]), pages=st.sampled_from([plenty, LENGTH // PAGE + 2]), **PLAYS)
    def play(slots: int, pages: int, **case: Any) -> None:
        rig.lent = [pages], rig.runner.memory_plan.num_rows + slots
        counts["hit"] += bench.play(rig, model, method, **case)
        counts["fetched"] += rig.counters.cache_fetched

    play()
    assert rig.split is not None
    rig.split.close()
    assert counts["hit"] > 2 * examples and counts["fetched"] > 0


@pytest.mark.parametrize(("name", "other"), [("gdn", "mamba2"), ("mamba2", "attention")])
def test_a_hit_costs_the_draft_model_its_new_tokens(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn continues in the row of the last one. A prompt whose row is gone, or another's, is read late."""
    monkeypatch.setattr(draft_model, "LATE_TOKENS", 6)
    rigs = Rigs(tmp_path)
    rig = Rig(rigs.path(name), drafts=3, rows=2, cache_slots=9, method="draft", draft_model=str(rigs.path(other)))
    drafter = draft_model.DraftModelDrafter(rig.config, rig.runner.memory_plan, VOCAB)
    computed, launch = list[tuple[int, int]](), drafter.runner.launch
    monkeypatch.setattr(
        drafter.runner,
        "launch",
        lambda plan: computed.extend((row.computed, len(row.tokens)) for row in plan.extend) or launch(plan),
    )
    engine, found = rig.engine(AdaptiveDrafter(drafter, 3, patience=5)), Samples()

    def ask(prompt: list[int], **params: Any) -> list[int]:
        computed.clear()
        engine.add_request(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, **params), "r")
        while engine.has_unfinished():
            found.add(engine.step())
        (wanted,) = (
            rigs.plain(name)
            .futures([Ask(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, seed=0))])
            .values()
        )
        sample = found.pop(("r", 0))
        assert sample.error is None, sample.error.__cause__
        assert sample.token_ids == wanted.token_ids[:8]
        return sample.token_ids

    text = [7 * i % 131 for i in range(30)]
    answer = ask(text)
    assert computed[0] == (0, 30 + 1)
    ask([*text, *answer, 5, 6])
    known = 30 + 7
    assert computed[0][0] <= known and sum(computed[0]) == 30 + 8 + 2 + 1 and computed[0][1] <= 8
    ask([*text, *answer, 5, 9], cache_salt="other")
    assert computed[0] == (0, 30 + 8 + 2 + 1), "another's row"
    for start in (60, 90):
        ask([start] * 5)  # both rows hold something else now
    ask([*text, *answer, 5, 6])
    late = known - 6
    assert computed[0][0] == 0 and computed[0][1] <= 30 + 8 + 2 + 1 - late
