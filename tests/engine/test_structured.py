"""Whole requests with structured outputs: their texts are valid, and every way of running gives the same ones."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import EngineError, GrammarError, NoTokenLeftError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.channel import control
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core import engine as engine_module
from hybridrt.kernels.core.operation import Operation
from hybridrt.parallel.tensor_parallel import _SplitStep
from hybridrt.runtime.run.launched_step import LaunchedStep, MaskedLines
from tests.support.levels import sweep
from tests.support.schemas import MANY_RULES, SCHEMAS
from tests.support.scripted_llm import scripted
from tests.support.tiny import write_tiny

PROMPT = "ab ab ab"
FREE = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
MODES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "graphs": {"graphs": True, "overlap": True},
    "chunked": {"chunked_prefill_size": 5, "overlap": True},
    "retracted": {"page_size": 4, "memory_pages": 26, "overlap": True},
    "ngram": {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)},
    "tree": {"speculative": SpeculativeConfig("ngram", num_draft_tokens=5, topk=2), "overlap": True, "graphs": True},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), generation={"eos_token_id": [2]})


def load(path: Path, *, overlap: bool = False, graphs: bool = False, memory_pages: int = 0, **options: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_model_len": 256, "seed": 5} | options
    llm = LLM(str(path), **{"max_running_requests": 16} | options)
    llm.engine._max_in_flight = int(overlap)
    if graphs:
        llm.engine.executor.capture()  # type: ignore[attr-defined]
    if memory_pages:
        pages = llm.engine._coordinator.pages
        pages.alloc([pages.num_free - memory_pages])
    return llm


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with load(path) as llm:
        yield llm


def structured(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=StructuredOutputs(**fields))


def cases() -> list[SamplingParams]:
    """Every schema, greedily and sampled; requests without a grammar between them."""
    compact = [schema | {"x-guidance": {"whitespace_flexible": False}} for schema in SCHEMAS]
    wild = {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1, "logprobs": 1}
    greedy = [structured(json=schema) for schema in compact]
    sampled = [replace(params, **wild, seed=i) for i, params in enumerate(greedy)]  # type: ignore[arg-type]
    others = [
        structured(regex="[ab]{3,9}c"),
        replace(structured(choice=["red", "green"]), temperature=1.0, seed=1, n=3),
    ]
    return [*greedy, FREE, *sampled, *others, FREE]


def check(llm: LLM, outputs: list[Any], params: list[SamplingParams]) -> None:
    """Texts are complete and valid, and a new matcher takes each of their tokens."""
    for output, p in zip(outputs, params, strict=True):
        spec = p.structured_outputs
        if spec is None:
            assert len(output.token_ids) == 12
            continue
        for sample in output.outputs:
            assert sample.finish_reason == "stop", (spec, sample.text)
            matcher = llm.engine.intake.compiler.matcher(spec)
            ended = [matcher.advance(token) for token in sample.token_ids if token != 2]
            assert ended == [False] * (len(ended) - 1) + [sample.token_ids[-1] != 2]
            if spec.kind == "json":
                schema = json.loads(str(spec.json))
                kind = jsonschema.Draft202012Validator
                jsonschema.validate(json.loads(sample.text), schema, kind, format_checker=kind.FORMAT_CHECKER)
            elif spec.choice:
                assert sample.text in spec.choice


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def found(plain: LLM) -> list[list[list[int]]]:
    params = cases()
    outputs = plain.generate([PROMPT] * len(params), params)
    check(plain, outputs, params)
    return tokens(outputs)


def test_every_output_is_valid(found: list[list[list[int]]]) -> None:
    assert len(found) > 2 * len(SCHEMAS) >= 80


@pytest.mark.parametrize("mode", sweep(MODES, len(MODES), thin=4))
def test_every_way_of_running_gives_the_same_tokens(mode: str, path: Path, found: list[list[list[int]]]) -> None:
    params = cases()
    with load(path, **MODES[mode]) as llm:
        outputs = llm.generate([PROMPT] * len(params), params)
        counters = llm.engine.counters()
        assert (counters.retractions > 0) == (mode == "retracted")
        assert (counters.accepted > 0) == (mode in ("ngram", "tree"))
    assert tokens(outputs) == found


def test_rows_without_a_grammar_are_not_touched(plain: LLM, found: list[list[list[int]]]) -> None:
    """Their tokens are those that they get alone."""
    (alone,) = tokens(plain.generate([PROMPT], FREE))
    assert alone == found[len(SCHEMAS)] == found[-1]


class Recorder:
    """The operations that are called, and what the executor is asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self.calls, runner = list[str](), llm.engine.executor
        call, launch, sample, result = Operation.__call__, runner.launch, LaunchedStep.sample, LaunchedStep.result

        def record(operation: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(operation.name)
            return call(operation, *args, **kwargs)

        def noted(name: str, what: Any) -> Any:
            return lambda *args: (self.calls.append(name), what(*args))[1]

        monkeypatch.setattr(Operation, "__call__", record)
        monkeypatch.setattr(runner, "launch", noted("launch", launch))
        monkeypatch.setattr(LaunchedStep, "sample", noted("masks", sample))
        monkeypatch.setattr(LaunchedStep, "result", noted("result", result))

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def test_steps_without_a_grammar_launch_what_they_launched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(path, overlap=True, prefix_cache=False, cuda_graph=False) as llm:  # no recordings
        recorder = Recorder(monkeypatch, llm)
        llm.generate([PROMPT] * 3, FREE)
        before = recorder.take()
        llm.generate([PROMPT] * 2, [FREE, structured(regex="[ab]{5}")])
        assert "masks" in recorder.take()
        llm.generate([PROMPT] * 3, FREE)
        assert recorder.take() == before and "masks" not in before


def test_masks_wait_for_the_step_before_and_the_device_does_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap: the forward pass of a step is launched, the tokens of the step before are read, masks are given."""
    with load(path, overlap=True) as llm:
        recorder = Recorder(monkeypatch, llm)
        llm.generate(PROMPT, replace(FREE, ignore_eos=False, structured_outputs=StructuredOutputs(regex="[ab]{4}")))
        events = [call for call in recorder.take() if call in ("launch", "masks", "result")]
    assert events == ["launch", "masks", *["launch", "result", "masks"] * 4, "result"]


def test_log_probabilities_are_the_models(plain: LLM) -> None:
    free = replace(FREE, logprobs=5, ignore_eos=False)
    bound = replace(free, structured_outputs=StructuredOutputs(regex="z{3}"))
    (one,), (other,) = plain.generate(PROMPT, free), plain.generate(PROMPT, bound)
    assert other.text == "zzz" and one.logprobs and other.logprobs
    likely = sorted(one.logprobs[0].items(), key=lambda entry: -entry[1])[:5]
    assert likely == sorted(other.logprobs[0].items(), key=lambda entry: -entry[1])[:5]


def test_a_grammar_that_cannot_be_followed_fails_alone(plain: LLM, found: list[list[list[int]]]) -> None:
    """A rule with many alternatives exceeds llguidance's limits after its first token. The others forbid each
    second token: by a list of those that are allowed, and by a list and a bad word."""
    engine = plain.engine
    a, b = (plain.tokenizer.encode_bare(text)[0] for text in "ab")  # type: ignore[union-attr]
    endless = structured(grammar=MANY_RULES)
    dead_ends = [
        replace(structured(regex="ab"), allowed_token_ids=[a]),
        replace(FREE, allowed_token_ids=[a], bad_words=["aa"]),
        replace(structured(regex="[ab]{3}"), allowed_token_ids=[a, b], bad_words=["aa", "ab", "ba", "bb"]),
    ]
    for i, params in enumerate([FREE, endless, structured(json=SCHEMAS[0]), *dead_ends]):
        engine.add_request(PROMPT, params, str(i), stream=False)
    ended = {}
    while engine.has_unfinished():
        ended |= {delta.request_id: delta for delta in engine.step()}
    assert ended["0"].token_ids == found[-1][0] and ended["0"].error is None and ended["2"].finish_reason == "stop"
    assert isinstance(ended["1"].error, GrammarError) and "cannot be followed any further" in str(ended["1"].error)
    for name in "345":
        assert ended[name].finish_reason == "abort" and len(ended[name].token_ids) == 1
        assert isinstance(ended[name].error, NoTokenLeftError) and "allow more" in str(ended[name].error)


def test_fields_that_forbid_every_first_token(plain: LLM) -> None:
    a = plain.tokenizer.encode_bare("a")  # type: ignore[union-attr]
    for params, fields in (
        (replace(structured(choice=["é"]), allowed_token_ids=a), "allowed_token_ids and structured_outputs"),
        (replace(FREE, allowed_token_ids=a, bad_words=["a"]), "allowed_token_ids and bad_words"),
        (replace(FREE, allowed_token_ids=[2], min_tokens=2), "allowed_token_ids and min_tokens"),
        (replace(structured(choice=["a"]), bad_words=["a"]), "bad_words and structured_outputs"),
    ):
        with pytest.raises(RequestError, match=f"{fields} forbid every first token"):
            plain.engine.prepare(PROMPT, params)


def test_a_step_whose_masks_cannot_be_given_ends_its_requests_alone(
    plain: LLM, monkeypatch: pytest.MonkeyPatch, found: list[list[list[int]]]
) -> None:
    def fail(step: LaunchedStep, masks: Any) -> None:
        raise ValueError("lost")

    with monkeypatch.context() as broken:
        broken.setattr(LaunchedStep, "sample", fail)
        with pytest.raises(EngineError, match="lost"):
            plain.generate(PROMPT, structured(regex="ab"))
    assert tokens(plain.generate([PROMPT] * 2, [FREE, structured(json=SCHEMAS[0])])) == [found[-1], found[0]]


def test_a_launch_that_was_broken_off_leaves_no_step_that_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes after the launch and before the engine has stored its handle."""
    with load(path) as llm:
        executor, bound = (
            llm.engine.executor,
            SamplingParams(temperature=0.0, max_tokens=4, structured_outputs=StructuredOutputs(regex="a+")),
        )
        expected, launch = llm.generate([PROMPT], bound)[0].token_ids, executor.launch

        def broken(plan: Any) -> Any:
            if launch(plan).needs_masks:
                raise SystemExit
            raise AssertionError("the first step of a constrained request needs masks")

        monkeypatch.setattr(executor, "launch", broken)
        with pytest.raises(SystemExit):
            llm.generate([PROMPT], bound)
        monkeypatch.undo()
        assert llm.generate([PROMPT], bound)[0].token_ids == expected


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["making", "giving"])
def test_a_step_that_gets_no_masks_is_read_before_its_row_is_lent_again(
    where: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor's double raises if a row, slot or page is lent again before a step that names it was read."""

    def fail(*args: Any) -> None:
        raise ValueError("lost")

    with scripted() as speaker:
        engine = speaker.llm.engine
        engine._max_in_flight = int(overlap)
        speaker.say("abcabcabcabc")
        for _ in range(2):
            with monkeypatch.context() as broken, pytest.raises(EngineError, match="lost"):
                if where == "making":
                    broken.setattr(engine_module, "step_masks", fail)
                broken.setattr(engine.executor, "fail_sample", ValueError("lost"))
                speaker.llm.generate([PROMPT] * 2, [FREE, structured(regex="[ab]{9}")])
        free, bound = speaker.llm.generate([PROMPT] * 2, [FREE, structured(regex="[ab]{9}")])
        assert free.text == "abcabcabcabc" and re.fullmatch("[ab]{9}", bound.text)


def test_a_step_that_gets_no_masks_is_not_waited_for() -> None:
    """With several ranks, where rank 0 looks after the others while it waits for a step."""
    step, still_there = LaunchedStep(MaskedLines(np.zeros(1, np.int32), 1)), iter([None])
    split: Any = SimpleNamespace(ranks=SimpleNamespace(check_alive=lambda: next(still_there)))
    with pytest.raises(EngineError, match="has not sampled"):
        _SplitStep(step, split).result()


def test_an_interrupt_between_a_step_and_its_masks_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call gives the masks, whether it launches a step or only reads one."""
    params, real, calls = structured(regex="[ab]{9}"), LaunchedStep.result, list[int]()

    def interrupted(step: LaunchedStep) -> Any:
        calls.append(1)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        return real(step)

    with load(path, overlap=True) as llm:
        (want,) = llm.generate(PROMPT, params)
        monkeypatch.setattr(LaunchedStep, "result", interrupted)
        llm.engine.add_request(PROMPT, params, "it")
        deltas = list[Any]()
        while llm.engine.has_unfinished():
            try:
                deltas += llm.engine.step()
            except KeyboardInterrupt:
                deltas += llm.engine.drain() if len(calls) == 6 else []
    assert [token for delta in deltas for token in delta.token_ids] == want.token_ids and len(calls) > 8


def test_where_an_output_ends(plain: LLM) -> None:
    """With the last token that can follow, before `min_tokens`, too; not at an end that more may follow before them."""
    base = replace(FREE, ignore_eos=False, max_tokens=30)

    def of(regex: str, **more: Any) -> Any:
        return plain.generate(PROMPT, replace(base, structured_outputs=StructuredOutputs(regex=regex), **more))[0]

    assert of("ab", min_tokens=5).text == "ab" and of("ab").finish_reason == "stop"
    long = of("a*", min_tokens=20)
    assert set(long.text) == {"a"} and len(long.token_ids) >= 20
    assert of("[ab]{9}", stop=["a", "b"]).text == "" and of("[ab]{9}", max_tokens=4).finish_reason == "length"
    with pytest.raises(RequestError, match="ignore_eos"):
        replace(base, ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))


FORMS = [
    {"regex": "[a-z ]{10,30}"},
    {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}},
    {"choice": ["alpha", "beta"]},
]
SPLIT: dict[str, dict[str, Any]] = {
    "chain": {"speculative": SpeculativeConfig("draft", draft_model="embedded_draft", num_draft_tokens=3)},
    "tree": {"speculative": SpeculativeConfig("draft", draft_model="embedded_draft", num_draft_tokens=5, topk=2)},
    "ranks": {"tp_size": 2},
}


@pytest.mark.slow
def test_ranks_and_draft_models_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a trained model, so that drafts are accepted. The other rank gets masks in several parts."""
    monkeypatch.setattr(control, "PART_BYTES", 1000)
    params = [SamplingParams(temperature=0.0, max_tokens=24)] + [
        SamplingParams(temperature=t, seed=3, max_tokens=24, structured_outputs=StructuredOutputs(**form))
        for form in FORMS
        for t in (0.0, 1.0)
    ]
    found = {}
    for name, options in ({"plain": {}} | SPLIT).items():
        with LLM("embedded", device="cpu", dtype="float32", max_model_len=64, max_running_requests=8, **options) as llm:
            llm.engine._max_in_flight = 1
            found[name] = tokens(llm.generate(["def main():\n    import "] * len(params), params))
            assert (llm.engine.counters().accepted > 0) == (name in ("chain", "tree"))
    assert all(outputs == found["plain"] for outputs in found.values())
