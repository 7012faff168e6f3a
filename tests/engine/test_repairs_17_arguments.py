"""Arguments of the wrong kind, names of other runtimes, and settings that are wrong: typed errors, before loading."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrt import (
    LLM,
    AsyncLLM,
    CheckpointError,
    ConfigError,
    EngineConfig,
    HybridrtError,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputs,
    UnknownNameError,
)
from hybridrt.embedding import load
from hybridrt.engine.core import load_engine as load_module
from hybridrt.engine.request.intake import MAX_NAME_CHARACTERS
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.kernels.core import providers
from hybridrt.runtime.run import model_runner
from tests.support.tiny import write_tiny

FEW = SamplingParams(max_tokens=2, ignore_eos=True)
CHAT = [{"role": "user", "content": "a"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), load_format="dummy", device="cpu", max_model_len=128, max_running_requests=2) as llm:
        yield llm


ODD: list[Any] = [5, 1.5, True, b"x", [1], {"a": 1}, object(), None]


@pytest.mark.parametrize(
    "name", ["a" * 5000, "a/" + "b" * 5000, "~nobody-here/x", "\0", "\ud800", "", "/" + "a/" * 4000]
)
def test_names_of_models_that_no_path_can_have(name: str) -> None:
    for call in (lambda: LLM(name), lambda: load(EngineConfig(name))):
        with pytest.raises(ConfigError) as info:
            call()
        assert len(str(info.value)) < 700


@pytest.mark.parametrize("field", list(EngineConfig.__dataclass_fields__))
def test_every_field_of_the_engine_has_a_kind(field: str) -> None:
    for value in (object(), [1], "no such thing", -1.5):
        if isinstance(value, str) and (field in ("model", "device", "request_log") or "backend" in field):
            continue  # any text; whether there is one is known later
        with pytest.raises(ConfigError, match=field):
            EngineConfig(**{"model": "embedded"} | {field: value})
        with pytest.raises(ConfigError, match=field):
            LLM(**{"model": "embedded"} | {field: value})  # type: ignore[arg-type]


def test_fields_of_speculation_have_kinds() -> None:
    for field in SpeculativeConfig.__dataclass_fields__:
        with pytest.raises(ConfigError, match=field):
            SpeculativeConfig(**{field: object()})


CALLS: dict[str, Callable[[LLM, Any], Any]] = {
    "generate, prompts": lambda llm, v: llm.generate(v),
    "generate, params": lambda llm, v: llm.generate("a", v if v is not None else 5),
    "generate, one of the params": lambda llm, v: llm.generate(["a"], [v]),
    "stream, prompt": lambda llm, v: llm.stream(v),
    "stream, params": lambda llm, v: llm.stream("a", v if v is not None else 5),
    "chat, messages": lambda llm, v: llm.chat(v),
    "chat, params": lambda llm, v: llm.chat(CHAT, v if v is not None else 5),
    "chat, tools": lambda llm, v: llm.chat(CHAT, FEW, tools=v if v is not None else 5),
    "chat, tool_choice": lambda llm, v: llm.chat(CHAT, FEW, tool_choice=v if v is not None else 5),
    "chat, template": lambda llm, v: llm.chat(CHAT, FEW, chat_template=v if v is not None else 5),
    "chat, tool_parser": lambda llm, v: llm.chat(CHAT, FEW, tool_parser=v),
    "chat, reasoning_parser": lambda llm, v: llm.chat(CHAT, FEW, reasoning_parser=v),
    "stream_chat, messages": lambda llm, v: llm.stream_chat(v),
    "stream_chat, chat": lambda llm, v: llm.stream_chat(CHAT, FEW, chat=v if v is not None else 5),
    "save_session": lambda llm, v: llm.save_session(v, "a"),
    "save_session, prompt": lambda llm, v: llm.save_session("x", v),
    "save_session, note": lambda llm, v: llm.save_session("/nowhere/x", "a", note=v),
    "load_session": lambda llm, v: llm.load_session(v),
    "load_session, salt": lambda llm, v: llm.load_session("x", cache_salt=v if v is not None else 5),
    "dump_cache": lambda llm, v: llm.dump_cache(v),
    "submit": lambda llm, v: llm.engine.submit(v),
    "submit, id": lambda llm, v: llm.engine.submit(llm.engine.prepare("a", FEW), v if v is not None else ""),
    "submit, export_from": lambda llm, v: llm.engine.submit(
        llm.engine.prepare("a", FEW), export_from=v if v != 5 else -1  # type: ignore[arg-type]
    ),
    "add_request": lambda llm, v: llm.engine.add_request("a", v),
    "abort": lambda llm, v: llm.engine.abort(v),
    "start": lambda llm, v: llm.engine.start(v),
    "fail": lambda llm, v: llm.engine.fail(v, ValueError()),
    "gained": lambda llm, v: llm.engine.gained(v),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_odd_values_are_typed_errors_and_start_nothing(name: str, llm: LLM) -> None:
    before = llm.engine.counters()
    for value in ODD:
        if name.endswith(("prompts", "prompt")) and value == [1]:
            continue  # token ids
        with pytest.raises(HybridrtError):
            CALLS[name](llm, value)
    after = llm.engine.counters()
    assert (after.running, after.waiting, after.steps) == (before.running, before.waiting, before.steps)
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME_CHARACTERS + 1), "\udfff", *ODD[:-1]])
def test_odd_names_of_requests(name: Any, llm: LLM) -> None:
    async def submit() -> None:
        prepared = await served.prepare("a", FEW)
        for batch in (prepared, [prepared, prepared]):
            with pytest.raises(HybridrtError, match="request_id"):
                served.submit(batch, name)
        for call in (served.abort, served.stream_of):
            with pytest.raises(HybridrtError, match="request_id"):
                call(name)
        for wrong in (ODD[0], "text", ["text"], [prepared, 5]):
            with pytest.raises(HybridrtError, match="prepare"):
                served.submit(wrong)
        for timeout in ("x", -1, True, None):
            with pytest.raises(HybridrtError, match="timeout"):
                await served.drain(timeout)
        with pytest.raises(HybridrtError, match="timeout"):
            served.close("x")  # type: ignore[arg-type]
        assert not served.draining
        longest = "n" * (MAX_NAME_CHARACTERS - 2)
        assert [d async for d in served.submit([prepared], longest)] and not served.abort(longest)

    with AsyncLLM(llm) as served:
        asyncio.run(submit())


FOREIGN: list[tuple[Callable[[LLM], Any], str]] = [
    (lambda _: LLM("embedded", tensor_parallel_size=2), "tp_size"),
    (lambda _: LLM("embedded", gpu_memory_utilization=0.9), "memory_fraction"),
    (lambda _: LLM("embedded", max_num_seqs=8), "max_running_requests"),
    (lambda _: AsyncLLM("embedded", max_num_seqs=8), "max_running_requests"),
    (lambda _: EngineConfig("embedded", block_size=8), "page_size"),
    (lambda _: EngineConfig("embedded", mem_fraction_static=0.5), "memory_fraction"),
    (lambda _: LLM("embedded", trust_remote_code=True), "never run"),
    (lambda _: LLM("embedded", page_sise=8), "did you mean page_size"),
    (lambda _: SamplingParams(max_new_tokens=8), "max_tokens"),
    (lambda _: SamplingParams(guided_decoding=None), "structured_outputs"),
    (lambda _: StructuredOutputs(json_schema={}), "json"),
    (lambda _: SpeculativeConfig(num_speculative_tokens=3), "num_draft_tokens"),
    (lambda llm: llm.generate("a", use_tqdm=False), "progress bar"),
    (lambda llm: llm.generate(prompt_token_ids=[[1]]), "token ids as the prompt"),
    (lambda llm: llm.generate("a", max_tokens=5), r"SamplingParams\(max_tokens"),
    (lambda llm: llm.stream("a", use_tqdm=False), "progress bar"),
    (lambda llm: llm.chat(CHAT, FEW, use_tqdm=False), "progress bar"),
    (lambda llm: llm.stream_chat(CHAT, FEW, lora_request=1), "adapters"),
]  # type: ignore[call-arg, misc, list-item]


@pytest.mark.parametrize("index", range(len(FOREIGN)))
def test_names_of_other_runtimes_say_ours(index: int, llm: LLM) -> None:
    call, ours = FOREIGN[index]
    try:
        with pytest.raises(UnknownNameError, match=ours):
            call(llm)
    except TypeError as e:  # `generate` needs its prompts
        assert index == 13 and "prompts" in str(e)
    assert issubclass(UnknownNameError, TypeError) and issubclass(UnknownNameError, ConfigError)


def test_names_of_other_runtimes_of_tasks(llm: LLM) -> None:
    async def main() -> None:
        with pytest.raises(UnknownNameError, match="progress bar"):
            await served.complete("a", FEW, use_tqdm=False)
        with pytest.raises(UnknownNameError, match="sampling_params"):
            served.generate("a", sampling_param=FEW)

    with AsyncLLM(llm) as served:
        asyncio.run(main())


def test_attributes_of_other_runtimes_say_ours(llm: LLM) -> None:
    (output,), (answer,) = llm.generate("a", FEW), llm.chat(CHAT, FEW)
    assert output.outputs[0].text == output.text, "this one is the same"
    delta = next(llm.stream("a", FEW))
    for owner, name, ours in (
        (answer.outputs[0], "text", ".content"), (delta, "outputs", ".text"), (output, "finished", "finish_reason"),
        (output, "prompt", "prompt_token_ids"), (llm, "get_tokenizer", ".tokenizer"), (llm, "llm_engine", ".engine"),
        (output, "choices", ".text"), (answer, "choices", ".content"), (delta, "nothing_like_it", "nothing_like_it"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=re.escape(ours)):
            getattr(owner, name)
        assert not hasattr(owner, name)
    with AsyncLLM(llm) as served:
        for name, ours in (("stream", "call generate"), ("tokenizer", "it is .llm.tokenizer"), ("nothing", "nothing")):
            with pytest.raises(AttributeError, match=re.escape(ours)):
                getattr(served, name)


@pytest.mark.parametrize("change", [{"use_cache": "yes"}, {"initializer_range": "x"}, {"bos_token_id": [1.5]}])
def test_a_config_that_transformers_refuses_is_named_before_the_weights(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    monkeypatch.setattr(load_module, "ModelRunner", lambda *_, **__: pytest.fail("the model was loaded first"))
    with pytest.raises(ConfigError, match=rf"config\.json: transformers.*{next(iter(change))}"):
        LLM(str(path), load_format="dummy", device="cpu")


def test_a_broken_tokenizer_is_named_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(load_module, "ModelRunner", lambda *_, **__: pytest.fail("the model was loaded first"))
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(str(path), load_format="dummy", device="cpu")
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("rms_norm=nope", "nope"), ("rms_norm", "operation=provider"), ("nope=torch", "unknown operation 'nope'"),
        ("rms_norm=triton", "cpu"), ("sample=torch, rms_norm=flashinfer", "flashinfer"),
    ],
)  # fmt: skip
def test_providers_are_checked_at_the_start(
    value: str, text: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDRT_PROVIDERS", value)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(model_runner, "build_model", lambda *_: pytest.fail("weights were loaded"))
    providers._overrides.cache_clear()
    providers.select.cache_clear()
    try:
        for call in (
            lambda: LLM(str(model), load_format="dummy", device="cpu"),
            lambda: load(EngineConfig(str(model), load_format="dummy", device="cpu")),
        ):
            with pytest.raises(HybridrtError, match=text):
                call()
    finally:
        monkeypatch.undo()
        providers._overrides.cache_clear()
        providers.select.cache_clear()
