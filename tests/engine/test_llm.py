"""LLM over a runner without a model: shapes of prompts, streams, errors that leave nothing behind, interrupts."""

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import EngineError, HybridrtError, MemoryBudgetError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api import llm as llm_module
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.request.intake import Intake
from tests.support.engine_harness import ByteTokenizer
from tests.support.fake_llm import FIVE, VOCAB, FakeRunner, assert_clean, make
from tests.support.mock_executor import tokens_alone


def test_signature_has_the_fields_of_engine_config_as_keywords() -> None:
    parameters = list(inspect.signature(LLM).parameters.values())
    config = {f.name: f.default for f in fields(EngineConfig)}
    assert [p.name for p in parameters] == list(config)
    assert parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default == config[p.name] for p in parameters[1:])
    with pytest.raises(TypeError, match="no_such_option"):
        LLM("x", no_such_option=1)  # type: ignore[call-arg]


def test_every_argument_reaches_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    values = dict(
        device="cpu",
        dtype="float16",
        load_format="dummy",
        max_model_len=31,
        max_running_requests=3,
        memory_fraction=0.5,
        page_size=8,
        chunked_prefill_size=64,
        mamba_ssm_dtype="bfloat16",
        state_mode="replay",
        attention_backend="torch",
        prefill_attention_backend="triton",
        linear_attn_backend="gdn",
        cuda_graph=False,
        cuda_graph_max_bs=2,
        overlap=False,
        speculative=None,
        tp_size=2,
        transfer_bytes=1024,
        seed=9,
    )
    llm, _ = make(monkeypatch, **values)
    assert llm.config == EngineConfig(model="somewhere", **values)  # type: ignore[arg-type]


def test_prompts_may_be_one_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, ByteTokenizer())
    want = tokens_alone(b"ab", 1, 5, VOCAB)
    for prompts in ("ab", [97, 98], ["ab"], [[97, 98]], ((97, 98),), [(97, 98)]):
        (output,) = llm.generate(prompts, FIVE)  # type: ignore[arg-type]
        assert output.token_ids == want and output.prompt_token_ids == [97, 98]
        assert output.text == ByteTokenizer().decode(want).rstrip("\N{REPLACEMENT CHARACTER}")
    assert llm.generate([], FIVE) == []
    assert_clean(llm)


def test_outputs_come_in_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch, max_running_requests=2)
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (9, 1, 5)]
    outputs = llm.generate([[1], [2], [3]], params)
    assert [o.token_ids for o in outputs] == [
        tokens_alone([i], p.seed or 0, p.max_tokens or 0, VOCAB) for i, p in enumerate(params, 1)
    ]
    assert runner.max_in_flight == 2, "steps overlap"
    assert_clean(llm)


def test_n_samples_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    outputs = llm.generate([[1], [2]], [SamplingParams(max_tokens=3, n=3, seed=5), FIVE])
    assert [len(o.outputs) for o in outputs] == [3, 1]
    assert [s.index for s in outputs[0].outputs] == [0, 1, 2] and outputs[0].outputs[0] is outputs[0]
    assert len({tuple(s.token_ids) for s in outputs[0].outputs}) == 3


def test_default_sampling_params(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    assert 1 <= len(llm.generate([1])[0].token_ids) <= 63


def test_one_bad_prompt_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    before = llm.engine.counters()
    for bad in ([[1], []], [[1], [VOCAB]], [[1], [1] * 64], [[1], "text"], [[1], 3], [1, "text"], [[1], [None]]):
        with pytest.raises(RequestError):
            llm.generate(bad, FIVE)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling_params is 'greedy', a str"):
        llm.generate([[1], [2]], "greedy")  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="2 prompts and 1 SamplingParams"):
        llm.generate([[1], [2]], [FIVE])
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate([[1]], [None])  # type: ignore[list-item]
    assert llm.engine.counters() == before and not runner.plans
    assert_clean(llm)


def test_a_request_beyond_the_pool_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, max_model_len=500)
    with pytest.raises(MemoryBudgetError, match=r"cut prompt . max_tokens to 129"):
        llm.generate([[1], [1] * 100], SamplingParams(max_tokens=300))
    assert_clean(llm)


@pytest.mark.parametrize("tokenizer", [None, ByteTokenizer()])
def test_stream_adds_up_to_generate(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    llm, _ = make(monkeypatch, tokenizer)
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=4)
    deltas = list(llm.stream([1, 2], params))
    (whole,) = llm.generate([[1, 2]], params)
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.finish_reason for d in deltas] == [None] * 11 + ["length"]
    assert_clean(llm)


def test_streamed_samples_say_which_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=4, n=2)
    deltas = list(llm.stream([1], params))
    for i, sample in enumerate(llm.generate([1], params)[0].outputs):
        assert [t for d in deltas if d.index == i for t in d.token_ids] == sample.token_ids


def test_closing_a_stream_early_aborts_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    deltas = llm.stream([1], SamplingParams(max_tokens=50, ignore_eos=True))
    next(deltas), next(deltas)
    assert llm.engine.counters().running == 1
    deltas.close()  # type: ignore[attr-defined]
    assert llm.engine.counters().running == 1, "closing leaves a mark; the engine's next step frees"
    llm.engine.drain()
    assert llm.engine.counters().aborted == 1
    assert_clean(llm)


def test_a_bad_prompt_is_refused_before_the_first_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    with pytest.raises(RequestError):
        llm.stream([])
    llm.stream([1])
    assert_clean(llm)


def test_a_paused_stream_loses_nothing_to_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
    stream = llm.stream([7], params)
    first = next(stream)
    other = llm.stream([8], params)
    next(other)
    assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
    rest = [t for delta in stream for t in delta.token_ids]
    assert first.token_ids + rest == tokens_alone([7], 3, 9, VOCAB)
    other.close()  # type: ignore[attr-defined]
    llm.engine.drain()
    assert_clean(llm)


def test_an_interrupt_aborts_this_calls_requests_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("launch", "result"):
        llm, runner = make(monkeypatch, max_running_requests=2)
        other = llm.stream([9], SamplingParams(max_tokens=20, ignore_eos=True, seed=3))
        next(other)
        step = llm.engine.run_step

        def interrupted(step: Any = step, where: str = where, runner: FakeRunner = runner) -> None:
            if len(runner.plans) == 5:
                if where == "launch":
                    raise KeyboardInterrupt
                runner.interrupt = KeyboardInterrupt()
            step()

        monkeypatch.setattr(llm.engine, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2], [3]], SamplingParams(max_tokens=30, ignore_eos=True))
        monkeypatch.setattr(llm.engine, "run_step", step)
        assert llm.engine.counters().aborted == 3 and llm.engine.counters().waiting == 0
        assert sum(len(d.token_ids) for d in other) >= 15, "another call's request keeps running"
        assert_clean(llm)
        assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)


def test_a_failed_step_is_raised_and_leaves_a_working_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch, max_running_requests=2)
    runner.fail_result[2] = OSError("device lost")
    with pytest.raises(EngineError, match="device lost") as info:
        llm.generate([[1], [2], [3]], FIVE)
    assert isinstance(info.value.__cause__, OSError) and isinstance(info.value, HybridrtError)
    assert_clean(llm)
    runner.fail_launch[len(runner.plans) + 1] = OSError("again")
    with pytest.raises(EngineError, match="again"):
        list(llm.stream([1], FIVE))
    assert_clean(llm)
    assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)


def test_close_ends_everything_and_later_calls_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(monkeypatch)[0] as llm:
        stream = llm.stream([1], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        engine = llm.engine
    assert not engine.has_unfinished() and engine.counters().aborted == 1
    assert [d.finish_reason for d in stream][-1] == "abort"
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([[1]])
    with pytest.raises(EngineError, match="closed"):
        llm.stream([1])


def test_a_cpu_does_not_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "device", torch.device("cpu"))
    llm, runner = make(monkeypatch)
    llm.generate([[1]], FIVE)
    assert runner.max_in_flight == 1


def test_progress_is_shown_on_a_terminal_for_several_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[dict] = []
    updates: list[int] = []

    class Bar:
        n = 0

        def __init__(self, **kwargs: Any) -> None:
            bars.append(kwargs)

        def update(self, n: int) -> None:
            self.n += n
            updates.append(n)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *args: object) -> None:
            pass

    llm, _ = make(monkeypatch)
    monkeypatch.setattr(llm_module, "tqdm", Bar)
    for terminal, prompts, disabled in ((True, [[1], [2]], False), (True, [[1]], True), (False, [[1], [2]], True)):
        monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda terminal=terminal: terminal))
        updates.clear()
        llm.generate(prompts, FIVE)
        assert bars[-1]["disable"] is disabled and bars[-1]["total"] == sum(updates) == len(prompts)


def test_a_prompt_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ByteTokenizer()
    read: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: (read.append(text), encode(text))[1])
    llm, _ = make(monkeypatch, tokenizer)
    outputs = llm.generate(["ab", "cd"], SamplingParams(max_tokens=2, ignore_eos=True, n=2))
    list(llm.stream("ef", FIVE))
    assert read == ["ab", "cd", "ef"]
    first, second = outputs[0].outputs
    assert first.prompt_token_ids is second.prompt_token_ids


def test_token_ids_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    checked: list[object] = []
    prepare = Intake.prepare
    monkeypatch.setattr(Intake, "prepare", lambda *args: (checked.append(args[1]), prepare(*args))[1])
    llm.generate([[1], [2]], FIVE)
    list(llm.stream([3], FIVE))
    assert checked == [[1], [2], [3]]
