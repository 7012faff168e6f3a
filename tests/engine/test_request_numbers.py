"""A request's numbers: out of range they are a typed error before anything runs, and no neighbour's token changes."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from hybridrt import LLM, HybridrtError, RequestError, SamplingParams
from tests.support.engine_harness import Rig
from tests.support.levels import draw, examples
from tests.support.tiny import VOCAB, write_tiny

NEIGHBOUR = SamplingParams(max_tokens=4, seed=7, ignore_eos=True)
PROMPT = [5, 6, 7]
EDGES = [
    *(sign * (2**bits + more) for bits in (0, 1, 8, 31, 32, 63, 64, 128) for more in (-1, 0, 1) for sign in (1, -1)),
    10**400, 1e-46, 1e-45, 1e-40, 1e-38, 1e-7, 1e-5, 0.5, 1.0, 1e7, 1e30, 1e38, 3.5e38, 1e308,
    math.inf, -math.inf, math.nan, -0.0, VOCAB - 1, VOCAB, VOCAB + 1,
]  # fmt: skip


def numpy_scalars(value: Any) -> list[Any]:
    """The value as every numpy scalar that holds it."""
    kinds = (np.int8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64)
    found = []
    for kind in kinds:
        try:
            found.append(kind(value))
        except (OverflowError, ValueError):
            continue
    return found


with np.errstate(over="ignore"):
    SCALARS = [scalar for value in EDGES for scalar in [value, *numpy_scalars(value)]]
WRONG = [None, True, False, np.True_, "1", b"1", [], [1], {}, {1}, object(), 1j, np.array([1, 2])]
VALUES = st.one_of(st.sampled_from(SCALARS), st.sampled_from(WRONG), st.integers(), st.floats())
LISTS = st.one_of(VALUES, st.lists(VALUES, max_size=3))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
         "frequency_penalty", "ignore_eos", "seed", "logprobs", "n"),
        VALUES,
    ),
    "stop": LISTS,
    "stop_token_ids": LISTS,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny(tmp_path_factory.mktemp("tiny"))
    with LLM(str(path), load_format="dummy", device="cpu", max_model_len=32, max_running_requests=4) as model:
        yield model


def alone(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, NEIGHBOUR)[0].token_ids


@examples(30, 300)
def test_no_number_of_a_request_fails_its_neighbours(llm: LLM, examples: int) -> None:
    names = st.dictionaries(st.sampled_from(list(FIELDS)), st.none(), min_size=1, max_size=3)

    def ask(values: dict[str, None], data: st.DataObject) -> None:
        ask_beside(llm, {name: data.draw(FIELDS[name], label=name) for name in values})

    draw(examples, ask, names, st.data(), suppress_health_check=list(HealthCheck))


def ask_beside(llm: LLM, fields: dict[str, Any]) -> None:
    before = llm.engine.counters()
    try:
        params = SamplingParams(**{"max_tokens": 2, "n": 1} | fields)
        llm.engine.prepare([9, 8], params)
    except RequestError:
        assert llm.engine.counters() == before, "it was refused, and yet something changed"
        return
    if params.n > 8:
        return  # in range; hundreds of samples would only take long
    neighbour, other = llm.generate([PROMPT, [9, 8]], [NEIGHBOUR, params])
    assert neighbour.token_ids == alone(llm)
    assert all(type(t) is int and 0 <= t < VOCAB for sample in other.outputs for t in sample.token_ids)
    assert llm.engine.counters().failed == before.failed


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 2**31), ("seed", 2**63), ("stop_token_ids", [2**31]), ("temperature", 1e39), ("max_tokens", 2**31),
     ("repetition_penalty", 1e-46), ("repetition_penalty", 1e39), ("ignore_eos", "no")],
)  # fmt: skip
def test_numbers_that_no_buffer_holds_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop_token_ids"])
def test_a_duration_is_no_number(name: str) -> None:
    """numpy says that it is an integer."""
    value: Any = np.timedelta64(1, "s")
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: [value] if name == "stop_token_ids" else value})


def test_a_stop_string_with_a_lone_surrogate_is_refused() -> None:
    """Ranks could not be told of it: the step failed, with every request in it."""
    with pytest.raises(RequestError, match="lone surrogate"):
        SamplingParams(stop=["end", "\udcff"])


@pytest.mark.parametrize("value", [np.ones((3, 3)), "a\n b"])
def test_a_refused_value_is_shown_on_one_line(value: Any) -> None:
    with pytest.raises(RequestError) as info:
        SamplingParams(temperature=value)
    assert "\n" not in str(info.value)


def test_numpy_numbers_are_kept_as_pythons() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), top_p=np.float64(0.25), top_k=np.uint8(4),  # type: ignore[arg-type]
        seed=np.uint64(2**63 - 1), logprobs=np.int16(2), n=np.int32(2), stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
    )  # fmt: skip
    assert params == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.25, top_k=4, seed=2**63 - 1, logprobs=2, n=2, stop_token_ids=[1, 2]
    )
    kept = [params.max_tokens, params.temperature, params.top_k, params.seed, *params.stop_token_ids]
    assert [type(value) for value in kept] == [int, float, int, int, int, int]


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"stop_token_ids": [VOCAB]}, f"stop_token_ids holds {VOCAB}; the vocabulary ends at {VOCAB - 1}")],
)
def test_what_the_vocabulary_lacks_is_refused_before_the_queue(llm: LLM, fields: dict[str, Any], text: str) -> None:
    before = llm.engine.counters()
    with pytest.raises(RequestError, match=text):
        llm.engine.add_request(PROMPT, SamplingParams(**fields))
    assert llm.engine.counters() == before


def test_more_logprobs_than_the_vocabulary_has_are_refused_before_the_queue() -> None:
    rig = Rig(vocab=23)
    with pytest.raises(RequestError, match="logprobs is 24 and the vocabulary has 23"):
        rig.add([1], logprobs=24)
    assert not rig.engine.has_unfinished()


def test_candidates_beyond_the_vocabulary_are_all_of_it(llm: LLM) -> None:
    draws = [
        llm.generate(PROMPT, SamplingParams(max_tokens=6, seed=3, top_k=k, ignore_eos=True))[0].token_ids
        for k in (-1, VOCAB, VOCAB + 1, 2**31 - 1)
    ]
    assert draws == [draws[0]] * 4


@pytest.mark.parametrize(
    ("argument", "value"),
    [("request_id", 5), ("request_id", b"a"), ("request_id", ["a"]), ("export_to", 5),
     ("request_id", "\ud800"), ("export_to", range(0, 2**63 + 1)),
     ("export_to", 1.5), ("export_to", True), ("export_to", "0")],
)  # fmt: skip
def test_names_and_places_of_a_request_are_checked(llm: LLM, argument: str, value: Any) -> None:
    before = llm.engine.counters()
    with pytest.raises(RequestError, match=argument):
        llm.engine.submit(llm.engine.prepare(PROMPT, NEIGHBOUR), **{argument: value})
    assert llm.engine.counters() == before


def unpackable() -> SamplingParams:
    """Parameters that passed every check, and yet no buffer holds them."""
    params = SamplingParams(max_tokens=4)
    object.__setattr__(params, "top_k", 2**31)
    return params


def test_a_request_that_cannot_be_packed_is_refused_before_the_queue(llm: LLM) -> None:
    """In a step it would fail all rows, and end the other ranks."""
    before = llm.engine.counters()
    with pytest.raises(RequestError, match="no buffer of the device holds"):
        llm.engine.add_request(PROMPT, unpackable())
    assert llm.engine.counters() == before


@pytest.mark.parametrize("temperature", [0.0, 1e-46, 1e-45, 1e-38, 9e-6])
def test_a_tiny_temperature_with_filters_is_greedy(llm: LLM, temperature: float) -> None:
    want = llm.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0].token_ids
    for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5, "min_p": 0.2}):
        params = SamplingParams(max_tokens=6, temperature=temperature, ignore_eos=True, **filters)  # type: ignore[arg-type]
        sampled = SamplingParams(max_tokens=6, seed=1, **filters)  # type: ignore[arg-type]  # keeps the step from being all greedy
        got, _ = llm.generate([PROMPT, [9]], [params, sampled])
        assert got.token_ids == want, filters


def test_errors_are_short_whatever_was_passed(tmp_path: Path) -> None:
    """An error's text is short, whatever was passed."""

    class Rude:
        def __repr__(self) -> str:
            raise ValueError

    for value in ("x" * 10**6, 10**5000, Rude()):
        with pytest.raises(HybridrtError) as info:
            SamplingParams(top_k=value)  # type: ignore[arg-type]
        assert len(str(info.value)) < 200
