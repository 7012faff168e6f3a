"""A device that runs out of memory while a runner is built: the error says what to change."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.runtime.load import runtime
from hybridrt.runtime.run import model_runner
from hybridrt.runtime.run.model_runner import ModelRunner
from tests.support.tiny import write_tiny


@pytest.mark.parametrize(
    ("broken", "advice"),
    [
        ("build_model", "loading weights: run it on a larger device"),
        ("build_pools", "allocating pools: lower memory_fraction"),
    ],
)
def test_out_of_memory(broken: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(model_runner if hasattr(model_runner, broken) else runtime, broken, fail)
    with pytest.raises(MemoryBudgetError, match=rf"{advice}.*20 GiB"):
        ModelRunner(EngineConfig(str(write_tiny(tmp_path, tokenizer=False)), device="cpu", load_format="dummy"))


@pytest.mark.parametrize(
    ("rows", "chunk", "tokens"),
    [(None, 4096, 2048 + 256), (1, 4096, 2303 + 1), (4, 300, 380 + 4), (128, 300, 512 + 128), (4, 16, 128 + 4)],
)
def test_memory_that_graphs_of_prompts_keep(rows: int | None, chunk: int, tokens: int) -> None:
    """That of the largest one's tokens, with those that pad it. With 128 rows no graph is between 256 and 512."""
    config = EngineConfig("model", max_running_requests=rows, chunked_prefill_size=chunk)
    target: Any = SimpleNamespace(device=torch.device("cuda"))
    assert model_runner._graph_activations(config, target, 1000 * chunk) == 1000 * tokens
