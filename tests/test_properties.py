"""Random schedules on real tiny models: whatever runs next to a request, it gets the tokens that it gets alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt.base.sampling_params import SamplingParams
from tests.models.test_models_parity import prompts
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import drawn, sweep
from tests.support.samples import Samples
from tests.support.session import Session, budget
from tests.support.ties import check_greedy

HISTORY = "swa_ssm-plain"
MODELS = ("falcon-groups_no_conv_bias_tied", "nemotron-one_group_biases", "qwen-dense_by_number", HISTORY)
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 30, 40)
PROMPTS = prompts(*LENGTHS, seed=11)
LONGEST, MAX_LEN = 22, 64


@dataclass(frozen=True)
class Plan:
    """One request of a schedule: catalogue entry, tokens wanted, steps after which it arrives and is aborted."""

    prompt: int
    count: int
    sampled: bool
    arrives: int
    aborted: int | None
    stop: int | None  # index, in what it would generate, of the token id that stops it


@dataclass
class Bench:
    """Sessions of one model with pools of several sizes, and what every request generates alone."""

    checkpoints: CheckpointStore
    name: str
    sessions: dict[Any, Session] = field(default_factory=dict)
    alone: dict[tuple[int, bool], list[int]] = field(default_factory=dict)

    def session(self, rows: int, pages: int, state_mode: str, alone: bool = False) -> Session:
        if self.name == HISTORY:  # no ring; a window of 9 tokens, however long the request
            pages, state_mode = pages // 4, "classic"
        key = rows, pages, state_mode, alone
        if key not in self.sessions:
            path = self.checkpoints[self.name].path
            config: dict[str, Any] = {"page_size": 4, "state_mode": state_mode, "max_model_len": MAX_LEN}
            config["max_running_requests"] = rows
            self.sessions[key] = Session(path, budget_bytes=budget(path, rows=rows, pages=pages, **config), **config)
        return self.sessions[key]

    def expected(self, plan: Plan) -> tuple[list[int], str]:
        whole = self.tokens_alone(plan.prompt, plan.sampled)
        tokens = whole[: plan.count]
        if plan.stop is None or whole[plan.stop] not in tokens:
            return tokens, "length"
        return tokens[: tokens.index(whole[plan.stop]) + 1], "stop"

    def tokens_alone(self, prompt: int, sampled: bool) -> list[int]:
        if (prompt, sampled) not in self.alone:
            session = self.session(1, MAX_LEN // 4, "classic", alone=True)
            engine = session.engine()
            engine.add_request(PROMPTS[prompt], params(prompt, sampled, LONGEST), stream=False)
            while engine.has_unfinished():
                deltas = engine.step()
            self.alone[prompt, sampled] = deltas[0].token_ids
        return self.alone[prompt, sampled]

    def params_of(self, plan: Plan) -> SamplingParams:
        tokens = self.tokens_alone(plan.prompt, plan.sampled)
        stop = () if plan.stop is None else (tokens[plan.stop],)
        return params(plan.prompt, plan.sampled, plan.count, stop)


def params(prompt: int, sampled: bool, count: int, stop: tuple[int, ...] = ()) -> SamplingParams:
    heat: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.95} if sampled else {"temperature": 0.0}
    return SamplingParams(max_tokens=count, ignore_eos=True, seed=100 + prompt, stop_token_ids=stop, **heat)


@pytest.fixture(scope="module", params=sweep(MODELS, 2, thin=3))
def bench(request: pytest.FixtureRequest, checkpoints: CheckpointStore) -> Iterator[Bench]:
    yield Bench(checkpoints, request.param)


REQUESTS = st.builds(
    Plan,
    prompt=st.integers(0, len(LENGTHS) - 1),
    count=st.integers(1, LONGEST),
    sampled=st.booleans(),
    arrives=st.integers(0, 25),
    aborted=st.none() | st.none() | st.integers(0, 30),
    stop=st.none() | st.none() | st.integers(0, LONGEST - 1),
)


@pytest.mark.parametrize(("bench", "examples"), drawn(MODELS, 4, 3, 6, 80, thin=2), indirect=["bench"])
def test_every_request_gets_the_tokens_that_it_gets_alone(bench: Bench, examples: int) -> None:
    """Random arrivals, lengths, stops and aborts; pools too small for all; chunked prefill; retraction; overlap."""

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        plans=st.lists(REQUESTS, min_size=1, max_size=9),
        rows=st.sampled_from([1, 2, 4]),
        pages=st.sampled_from([16, 20, 40]),
        chunk=st.sampled_from([1, 5, 16, 64]),
        overlap=st.booleans(),
        state_mode=st.sampled_from(["classic", "replay"]),
    )
    def schedule(**case: Any) -> None:
        play(bench, **case)

    schedule()


def play(bench: Bench, plans: list[Plan], rows: int, pages: int, chunk: int, overlap: bool, state_mode: str) -> None:
    session = bench.session(rows, pages, state_mode)
    engine = session.engine(chunk=chunk, overlap=overlap)
    outputs = Samples()
    step = 0
    while step <= 30 or engine.has_unfinished():
        for i, plan in enumerate(plans):
            if plan.arrives == step:
                engine.add_request(PROMPTS[plan.prompt], bench.params_of(plan), str(i))
            if plan.aborted == step:
                engine.abort(str(i))
        if engine.has_unfinished():
            outputs.add(engine.step())
        session.coordinator.check()
        step += 1
        assert step < 2000
    session.assert_empty()
    for i, plan in enumerate(plans):
        out = outputs[str(i), 0]
        assert out.error is None
        wanted, reason = bench.expected(plan)
        if out.finish_reason == "abort":
            assert plan.aborted is not None
            wanted = wanted[: len(out.token_ids)]
        else:
            assert out.finish_reason == reason
        if out.token_ids != wanted:
            assert not plan.sampled, f"sampled tokens differ: {plan}"
            checkpoint = bench.checkpoints[bench.name]
            oracle = checkpoint.logits(PROMPTS[plan.prompt], out.token_ids)
            check_greedy(out.token_ids, oracle, f"{bench.name} {plan}")


@cache
def shuffled(count: int) -> list[list[int]]:
    """A few orders of `count` requests."""
    import random

    return [random.Random(seed).sample(range(count), count) for seed in range(3)]


@pytest.mark.parametrize("order", sweep(range(3), 3))
def test_order_and_neighbours_change_nothing(bench: Bench, order: int) -> None:
    """All at once, in any order, with and without neighbours that are dropped midway."""
    session = bench.session(4, 40, "replay")
    which = shuffled(len(LENGTHS))[order]
    for dropped in ((), which[::3]):
        engine = session.engine(chunk=16, overlap=bool(order % 2))
        for i in which:
            engine.add_request(PROMPTS[i], params(i, bool(i % 2), 12), str(i))
        outputs = Samples()
        for step in range(10_000):
            if not engine.has_unfinished():
                break
            if step == 6:
                for i in dropped:
                    engine.abort(str(i))
            outputs.add(engine.step())
        session.assert_empty()
        for i in which:
            tokens = outputs[str(i), 0].token_ids
            assert tokens == bench.tokens_alone(i, bool(i % 2))[: len(tokens)]
            assert len(tokens) == 12 or i in dropped
