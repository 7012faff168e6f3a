"""An answer that was cut goes on after the tokens that came: it is the answer that would have come."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.grammar import mask_time
from hybridrt.engine.grammar.matcher import Matcher
from hybridrt.engine.request.sample_request import new_detokenizer, resumed_text
from hybridrt.runtime.load.model_path import resolve_model_path
from tests.support.levels import sweep

PROMPT = "def read_lines(path):\n    "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(resolve_model_path("embedded")), device="cpu", max_running_requests=4, max_model_len=256) as made:
        yield made


OPTIONS: list[dict[str, Any]] = [
    {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"temperature": 0.0}, {"seed": 5},
    {"seed": 7, "logprobs": 2}, {"temperature": 0.0, "min_tokens": 20, "ignore_eos": True},
]  # fmt: skip


@pytest.mark.parametrize("options", sweep(OPTIONS, 5))
def test_the_rest_is_that_of_the_whole_answer(llm: LLM, options: dict[str, Any]) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=24, **options))[0]
    for kept in sorted(random.Random(0).sample(range(1, len(whole.token_ids)), 2)):
        params = SamplingParams(max_tokens=24, resume_token_ids=whole.token_ids[:kept], **options)
        rest = llm.generate([PROMPT, "x"], params)[0]
        assert rest.token_ids == whole.token_ids[kept:] and rest.finish_reason == whole.finish_reason
        text = llm.tokenizer.decode(whole.token_ids[:kept]) if llm.tokenizer is not None else ""
        assert text + rest.text == whole.text
        assert options.get("logprobs") is None or len(rest.logprobs or ()) == len(rest.token_ids)


def test_a_stop_string_that_begins_before_the_cut_is_found(llm: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 24}
    whole = llm.generate(PROMPT, SamplingParams(**params))[0]
    kept = 6
    before, after = (llm.tokenizer.decode(part) for part in (whole.token_ids[:kept], whole.token_ids[kept:]))
    stop = before[-1] + after[:2]
    expected = llm.generate(PROMPT, SamplingParams(stop=[stop], **params))[0]
    rest = llm.generate(PROMPT, SamplingParams(stop=[stop], resume_token_ids=whole.token_ids[:kept], **params))[0]
    assert rest.finish_reason == expected.finish_reason == "stop"
    assert rest.token_ids == expected.token_ids[kept:]


def test_what_cannot_be_resumed(llm: LLM) -> None:
    vocab = llm.model_config.vocab_size
    for options, field in (
        ({"max_tokens": 2, "resume_token_ids": [5, 6]}, "max_tokens"),
        ({"n": 2, "resume_token_ids": [5]}, "n"),
        ({"prompt_logprobs": 1, "resume_token_ids": [5]}, "resume_token_ids"),
        ({"resume_token_ids": [vocab]}, "resume_token_ids"),
        ({"stop_token_ids": [7], "resume_token_ids": [5, 7, 8]}, "resume_token_ids"),
        ({"max_tokens": None, "resume_token_ids": [5] * 255}, "resume_token_ids"),
    ):
        with pytest.raises(RequestError) as error:
            llm.generate(PROMPT, SamplingParams(**options))
        assert error.value.field == field
    assert not llm.engine.has_unfinished()


def test_a_form_holds_from_the_first_token_on(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    from hybridrt.structured_outputs import StructuredOutputs

    form = StructuredOutputs(regex="[a-c]{4,9}")
    params = {"seed": 3, "max_tokens": 16, "structured_outputs": form}
    whole = llm.generate(PROMPT, SamplingParams(**params))[0]
    rest = llm.generate(PROMPT, SamplingParams(resume_token_ids=whole.token_ids[:2], **params))[0]
    assert rest.token_ids == whole.token_ids[2:]
    wrong = llm.tokenizer.encode_bare("xyz")
    with pytest.raises(RequestError):
        llm.generate(PROMPT, SamplingParams(resume_token_ids=wrong, **params))


@pytest.mark.parametrize("kept", sweep(range(1, 10), 4, thin=2))
def test_text_before_half_a_character_has_come(llm: LLM, kept: int) -> None:
    """The embedded model writes characters that it does not know byte by byte."""
    pytest.importorskip("llguidance")
    from hybridrt.structured_outputs import StructuredOutputs

    params = {"temperature": 0.0, "max_tokens": 16, "structured_outputs": StructuredOutputs(choice=["a日本x😀b"])}
    whole = llm.generate(PROMPT, SamplingParams(**params))[0]
    assert len(whole.token_ids) > 10
    rest = llm.generate(PROMPT, SamplingParams(resume_token_ids=whole.token_ids[:kept], **params))[0]
    prepared = llm.engine.prepare(PROMPT, SamplingParams(resume_token_ids=whole.token_ids[:kept], **params))
    told = new_detokenizer(llm.tokenizer, prepared)
    for token in whole.token_ids[:kept]:  # as it came, a token a step
        told.advance([token])
    assert resumed_text(llm.tokenizer, prepared) == told.take_text(False)
    assert resumed_text(llm.tokenizer, prepared) + rest.text == whole.text == "a日本x😀b"


def test_a_grammar_reads_them_before_the_request_is_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests wait while one is queued. Prompts with the same parameters share the work."""
    pytest.importorskip("llguidance")
    from hybridrt.structured_outputs import StructuredOutputs

    read, advance = list[int](), Matcher.advance
    monkeypatch.setattr(Matcher, "advance", lambda self, token: (read.append(token), advance(self, token))[1])
    ids = llm.tokenizer.encode_bare("ab") + llm.tokenizer.encode_bare("c")
    form = StructuredOutputs(regex="[a-c]{4,9}")
    params = SamplingParams(max_tokens=16, resume_token_ids=ids, structured_outputs=form)
    first, second = llm.engine.intake.prepare_all([PROMPT, "x"], params)
    assert read == ids
    name = llm.engine.submit(first)
    assert read == ids
    llm.engine.abort(name)
    llm.engine.drain()
    assert first.matcher is not None and second.matcher is not None
    assert np.array_equal(first.matcher.mask(), second.matcher.mask())


def test_a_grammar_that_needs_long_for_them_refuses_the_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    from hybridrt.structured_outputs import StructuredOutputs

    clock = count()  # a second more each time that it is read
    monkeypatch.setattr(mask_time.time, "thread_time", lambda: float(next(clock)))
    form = StructuredOutputs(grammar='start: a\na: a a | "x"')
    ids = llm.tokenizer.encode_bare("x")[:1] * 100
    params = SamplingParams(max_tokens=200, resume_token_ids=ids, structured_outputs=form)
    with pytest.raises(RequestError, match=r"ms of CPU time a token.*simpler") as error:
        llm.engine.prepare(PROMPT, params)
    assert error.value.field == "resume_token_ids" and next(clock) <= 4
