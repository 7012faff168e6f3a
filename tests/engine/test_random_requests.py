"""Random requests, with and without grammars, that are aborted at random and whose steps fail at random: the executor's
double checks what each step names, and afterwards nothing is held."""

import random
import re
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest

from hybridrt import RequestError, SamplingParams, StructuredOutputs
from tests.support.cache_ledger import check_cache
from tests.support.levels import sweep
from tests.support.mock_executor import MockExecutor
from tests.support.scripted_llm import Scripted, scripted

FORMS: list[dict[str, Any]] = [
    {"regex": "[ab]{1,9}c?"},
    {"choice": ["red", "green", "greener"]},
    {"json": {"type": "object", "properties": {"a": {"enum": [0, 1]}}, "required": ["a"]}},
    {"grammar": 'start: "a" start'},  # cannot be followed far
]
CAUSES = "boom|cannot be followed any further|no token is left"


@pytest.fixture(scope="module")
def random_model() -> Iterator[Scripted]:
    """It draws any token."""
    with scripted() as model:
        executor: Any = model.llm.engine.executor
        executor.draw = MethodType(MockExecutor.draw, executor)
        yield model


def params(rng: random.Random, letters: list[int]) -> SamplingParams:
    form = rng.choice([*FORMS, *[None] * 5])
    return SamplingParams(
        max_tokens=rng.randrange(1, 30), seed=rng.randrange(99), n=rng.choice((1, 1, 3)),
        structured_outputs=None if form is None else StructuredOutputs(**form),
        allowed_token_ids=letters if rng.random() < 0.1 else None, stop=["b"] if rng.random() < 0.2 else (),
    )  # fmt: skip


@pytest.mark.parametrize("seed", sweep(range(30), 10, 15))
def test_whatever_comes_and_fails_nothing_is_lent_twice(seed: int, random_model: Scripted) -> None:
    rng, engine = random.Random(seed), random_model.llm.engine
    executor: Any = engine.executor
    engine._most_in_flight, executor.late = rng.randrange(2), rng.randrange(2)
    assert random_model.llm.tokenizer is not None
    letters = random_model.llm.tokenizer.encode_bare("abcd")
    live: dict[str, SamplingParams] = {}
    texts: dict[tuple[str, int], str] = {}
    for step in range(10_000):
        if step < 120 and rng.random() < 0.4 and len(live) < 12:
            given = params(rng, letters)
            try:
                live[engine.add_request("hello world " * rng.randrange(1, 30), given)] = given
            except RequestError as e:
                assert "forbid every first token" in str(e)
        if live and rng.random() < 0.05:
            engine.abort(rng.choice(list(live)))
        for failures in (executor.fail_launch, executor.fail_result):
            failures |= {len(executor.plans): ValueError("boom")} if rng.random() < 0.02 else {}
        executor.fail_sample = ValueError("boom") if rng.random() < 0.02 else None
        if step >= 120 and not engine.has_unfinished():
            break
        for delta in engine.step() if rng.random() < 0.9 else engine.drain():
            key = delta.request_id, delta.index
            texts[key] = texts.get(key, "") + delta.text
            assert delta.error is None or re.search(CAUSES, str(delta.error)), delta.error
            form = live[delta.request_id].structured_outputs
            if delta.finish_reason == "stop" and form is not None and form.regex and not live[delta.request_id].stop:
                assert re.fullmatch(form.regex, texts[key])
        check_cache(engine._coordinator)
    assert not engine.has_unfinished() and engine.counters().free_rows == 8
