"""What an application has set in torch reaches neither loading nor steps, and is as it was afterwards."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from hybridrt.base import turns
from hybridrt.base.turns import undisturbed
from hybridrt.embedding import EngineConfig, build, load, plan_memory
from tests.support.checkpoints import CASES
from tests.support.levels import sweep
from tests.support.tiny import write_tiny

PROMPTS = [list(range(5, 22)), [30, 31, 32]]
PARAMS = [
    SamplingParams(
        max_tokens=6, temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True, logit_bias={5: 0.3},
        presence_penalty=0.3,
    ),
    SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, min_p=0.01, seed=5, logprobs=1, ignore_eos=True),
]  # fmt: skip
SIZES: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "max_model_len": 96, "max_running_requests": 2, "page_size": 4,
    "chunked_prefill_size": 8,
}  # fmt: skip


@contextmanager
def setting(change: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(back)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": partial(setting, torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": partial(setting, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device": partial(setting, torch.set_default_device, "meta", None),
    "device context": partial(torch.device, "meta"),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": partial(setting, torch.use_deterministic_algorithms, True, False),
}


def seen() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def answers(path: Path, **options: Any) -> list[Any]:
    with LLM(str(path), **SIZES, **options) as llm:
        return of(llm.generate(PROMPTS, PARAMS))


def of(outputs: Any) -> list[Any]:
    return [(output.token_ids, output.logprobs, output.prompt_logprobs) for output in outputs]


@contextmanager
def everything() -> Iterator[None]:
    with ExitStack() as stack:
        for name, state in STATES.items():
            if name != "bfloat16":
                stack.enter_context(state())
        yield


def check(call: Callable[[], Any], want: Any, state: Callable[[], AbstractContextManager[Any]]) -> None:
    with state():
        before = seen()
        assert call() == want
        assert seen() == before


PLAIN = [name for name in CASES if name.endswith(("-plain", "rope"))]


@pytest.mark.parametrize("name", sweep(PLAIN, 20, thin=3))
def test_every_family_loads_and_runs_the_same(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, CASES[name], tokenizer=False)
    want = answers(path)
    for state in (everything, STATES["bfloat16"], STATES["autocast"]):
        check(lambda: answers(path), want, state)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.mark.parametrize("name", STATES)
def test_one_state_at_a_time(name: str, model: Path) -> None:
    check(lambda: answers(model, state_mode="replay"), answers(model, state_mode="replay"), STATES[name])


@pytest.mark.parametrize(
    "options",
    [{"speculative": SpeculativeConfig("ngram", num_draft_tokens=2, topk=2)}, {"host_cache_bytes": 2**22}],
    ids=["trees", "main memory"],
)
def test_options_change_nothing_of_that(options: dict[str, Any], model: Path) -> None:
    check(lambda: answers(model, **options), answers(model, **options), everything)


def test_an_llm_that_was_built_in_another_state_and_thread(model: Path, tmp_path: Path) -> None:
    """Sessions and later steps work whatever state there was when the pools were made."""
    want, made = answers(model), list[LLM]()
    with everything():
        made.append(LLM(str(model), **SIZES))
    with made.pop() as llm:
        assert of(llm.generate(PROMPTS, PARAMS)) == want
        found: list[Any] = []

        def in_another_thread() -> None:
            with everything():
                found.extend(of(llm.generate(PROMPTS, PARAMS)))
                llm.save_session(tmp_path / "session", PROMPTS[0])
                llm.reset_prefix_cache()
                llm.load_session(tmp_path / "session")

        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        assert found == want
        assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))[0].metrics.cached_tokens > 0


def test_tasks_get_the_same(model: Path) -> None:
    async def main() -> list[Any]:
        async with await AsyncLLM.create(str(model), **SIZES) as served:
            return of([await served.complete(*each) for each in zip(PROMPTS, PARAMS, strict=True)])

    check(lambda: asyncio.run(main()), asyncio.run(main()), everything)


def test_an_embedded_runtime_gives_the_same_logits() -> None:
    def logits() -> list[float]:
        loaded = load(EngineConfig("embedded", device="cpu", max_running_requests=2, max_model_len=64))
        runtime = build(loaded, plan_memory(loaded, budget_bytes=2**25))
        runtime.admit([0], [0])
        runtime.write_pages([0], [0], [0])
        batch = runtime.batch(input_ids=[101, 102, 103], rows=[0], seq_lens=[3], query_lens=[3])
        runtime.prepare(batch)
        first = runtime.logits(runtime.forward(batch))[-1]
        runtime.snapshot([0], [1])
        second = runtime.capture(max_rows=1).replay(input_ids=[104], rows=[0], seq_lens=[4])[0]
        return [*first.tolist(), *second.tolist()]

    want = logits()
    for state in (everything, STATES["bfloat16"]):
        check(logits, want, state)


def test_deterministic_algorithms_are_off_on_a_gpu_while_any_thread_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with setting(partial(torch.use_deterministic_algorithms, warn_only=True), True, False):
        with undisturbed():
            assert not torch.are_deterministic_algorithms_enabled()
            entered, leave = threading.Event(), threading.Event()

            def inside() -> None:
                with turns._NONDETERMINISTIC:
                    entered.set()
                    leave.wait(60)

            thread = threading.Thread(target=inside)
            thread.start()
            entered.wait(60)
        assert not torch.are_deterministic_algorithms_enabled(), "the other thread is still inside"
        leave.set()
        thread.join()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_usual_state_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ExitStack", lambda: pytest.fail("something was entered"))
    with undisturbed():
        pass
