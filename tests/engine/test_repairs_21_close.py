"""`close` gives memory back at once: no reference cycle keeps weights or pools until the garbage collector runs."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from hybridrt import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from hybridrt.embedding import EngineConfig, build, load, plan_memory
from hybridrt.runtime.run.model_runner import ModelRunner
from tests.support.checkpoints import CASES, Make, swa_ssm
from tests.support.levels import sweep
from tests.support.tiny import write_tiny

FEW = SamplingParams(max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_model_len": 96, "max_running_requests": 2}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch:
    """Weights and pools of a runtime. `kept` is how many bytes of them are still there."""

    def __init__(self, runtime: Any) -> None:
        tensors = [*runtime.model.parameters(), *runtime.model.buffers(), *_tensors(runtime.pools.kv)]
        tensors += _tensors(runtime.pools.req_to_token)
        if runtime.pools.req_to_token.mamba_pool is not None:
            tensors += _tensors(runtime.pools.req_to_token.mamba_pool)
        assert len(tensors) > 8
        self._tensors = [ref(tensor) for tensor in tensors]

    @property
    def kept(self) -> int:
        return sum(tensor.nbytes for found in self._tensors if (tensor := found()) is not None)


def _tensors(owner: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in vars(owner).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        found += [each for each in values if isinstance(each, torch.Tensor)]
    return found


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine.executor
    assert isinstance(runner, ModelRunner)
    return runner


PLAIN = [name for name in CASES if name.endswith("-plain")]


@pytest.mark.parametrize("name", sweep(PLAIN, 4))
def test_close_frees_weights_and_pools(name: str, tmp_path: Path) -> None:
    llm = LLM(str(write_tiny(tmp_path, CASES[name], tokenizer=False)), **SIZES)
    watch = Watch(runner_of(llm))
    llm.generate([[5, 6, 7], [8, 9]], FEW)
    next(llm.stream([5, 6], FEW))
    assert watch.kept > 0
    llm.close()
    assert watch.kept == 0


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (None, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=2)}),
        (None, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=2, topk=2)}),
        (None, {"state_mode": "replay", "host_cache_bytes": 2**22, "page_size": 4}),
        (swa_ssm(), {}),
    ],
    ids=["ngram", "trees", "replay, main memory", "two kinds in a stack"],
)
def test_options_leave_no_cycle(make: Make | None, options: dict[str, Any], tmp_path: Path) -> None:
    llm = LLM(str(write_tiny(tmp_path, make, tokenizer=False)), **SIZES, **options)
    watch = Watch(runner_of(llm))
    llm.generate([[5, 6, 7] * 4, [8, 9]], FEW)
    llm.close()
    assert watch.kept == 0


def test_a_draft_model_goes_with_its_target() -> None:
    drafts = SpeculativeConfig("draft", draft_model="embedded_draft")
    llm = LLM("embedded", device="cpu", max_model_len=96, max_running_requests=2, speculative=drafts)
    watch = Watch(runner_of(llm))
    llm.generate("def f(", FEW)
    llm.close()
    assert watch.kept == 0


def test_async_llm_gives_it_back_while_it_is_still_referred_to(tmp_path: Path) -> None:
    served = AsyncLLM(str(write_tiny(tmp_path, tokenizer=False)), **SIZES)
    watch = Watch(runner_of(served.llm))
    asyncio.run(served.complete([5, 6], FEW))
    assert served.close() and watch.kept == 0
    assert served.close(), "once more does nothing"


def test_an_embedded_runtime_goes_with_its_last_reference() -> None:
    loaded = load(EngineConfig("embedded", device="cpu", max_running_requests=2, max_model_len=64))
    runtime = build(loaded, plan_memory(loaded, budget_bytes=2**25))
    graphs = runtime.capture(max_rows=2)
    watch = Watch(runtime)
    assert graphs.fits(1)
    del loaded, runtime, graphs
    assert watch.kept == 0
