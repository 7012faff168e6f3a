"""LLM over a runner without a model."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core import load_engine as load_module
from hybridrt.mem_cache.pools.host_plan import NO_HOST_PLAN
from hybridrt.mem_cache.pools.memory_plan import PageGroup
from hybridrt.mem_cache.pools.page_groups import PageDemand
from tests.support.cache_ledger import check_cache
from tests.support.engine_harness import EOS
from tests.support.mock_executor import MockExecutor

VOCAB = 256
FIVE = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)


class FakeRunner(MockExecutor):
    """What LLM expects of hybridrt.runtime.run.model_runner.ModelRunner."""

    device = torch.device("cuda")  # never touched: steps run next to the host

    def __init__(
        self, config: EngineConfig, *, progress: bool = False, ahead: object = None, tp: object = None,
        experts: object = None,
    ) -> None:  # fmt: skip
        rows = config.max_running_requests or 4
        super().__init__(num_rows=rows, num_slots=rows, num_pages=32, page_size=4, vocab=VOCAB, late=1)
        self.model_path = config.model
        self.model_config = SimpleNamespace(
            vocab_size=VOCAB, eos_token_ids=(EOS,), image_tokens={}, vision=None, mrope=False
        )
        self.memory_plan = SimpleNamespace(
            slabs=None,
            host=NO_HOST_PLAN,
            num_rows=rows, num_slots=rows, num_pages=32, page_size=4, groups=(PageGroup(PageDemand(4), 32, 0),),
            max_model_len=config.max_model_len or 64,
        )  # fmt: skip
        self.pools = SimpleNamespace(req_to_token=SimpleNamespace(mamba_pool=None))


def make(monkeypatch: pytest.MonkeyPatch, tokenizer: Any = None, **config: Any) -> tuple[LLM, FakeRunner]:
    runners: list[FakeRunner] = []

    def build(config: EngineConfig, **kwargs: Any) -> FakeRunner:
        runners.append(FakeRunner(config, **kwargs))
        return runners[0]

    def split(config: EngineConfig, meanwhile: Callable[[], object], **kwargs: Any) -> SimpleNamespace:
        meanwhile()
        return SimpleNamespace(runner=build(config, **kwargs), close=lambda: None)

    monkeypatch.setattr(load_module, "ModelRunner", build)
    monkeypatch.setattr(load_module, "TensorParallelExecutor", split)
    monkeypatch.setattr(load_module, "load_tokenizer", lambda path: tokenizer)
    return LLM("somewhere", **config), runners[0]


def assert_clean(llm: LLM) -> None:
    counters = llm.engine.counters()
    assert not llm.engine.has_unfinished()
    check_cache(llm.engine._coordinator)
    assert (counters.running, counters.waiting, counters.free_pages + counters.cached_pages) == (0, 0, 32)
    assert counters.free_rows == counters.free_slots + counters.cached_slots == llm.plan.num_rows
