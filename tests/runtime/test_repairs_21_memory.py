"""memory_fraction on a CPU, sizes in errors, and what README says of texts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt import LLM, EngineConfig
from hybridrt.base.device import KNOWN, GPUFacts
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.collectives.groups import TPGroup
from hybridrt.mem_cache.pools.memory_plan import GIB, gib
from hybridrt.runtime.load import fit
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.precompile.pretend_gpu import pretended
from tests.support.checkpoints import falcon
from tests.support.tiny import write_tiny

ROOT = Path(__file__).parents[2]
FREE = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "free_host_memory", lambda: FREE)


@pytest.mark.parametrize("size", [1, 2])
def test_memory_fraction_works_on_a_cpu(free: None, size: int) -> None:
    target: Any = SimpleNamespace(device=torch.device("cpu"), tp=TPGroup(size=size))
    taken = 2**20
    assert fit.pool_budget(EngineConfig("any"), target, taken) == (FREE // size - taken) // 4, "a quarter by default"
    for fraction in (0.1, 0.25, 0.9):
        budget = fit.pool_budget(EngineConfig("any", memory_fraction=fraction), target, taken)
        assert budget == int(FREE // size * fraction) - taken


def test_the_plan_of_a_cpu_follows_it(free: None, tmp_path: Path) -> None:
    path = str(write_tiny(tmp_path, tokenizer=False))
    pages = []
    for fraction in (0.003, 0.006):
        with LLM(path, device="cpu", load_format="dummy", memory_fraction=fraction, max_running_requests=8) as llm:
            assert llm.plan.budget_bytes == int(FREE * fraction)
            assert llm.plan.pool_bytes <= llm.plan.budget_bytes
            pages.append(llm.plan.num_pages)
    assert pages[1] > 1.2 * pages[0]
    with pytest.raises(MemoryBudgetError, match=r"weights need .* use .*a memory_fraction above 1e-05"):
        LLM(path, device="cpu", load_format="dummy", memory_fraction=1e-5)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.00 GiB"), (1, "0.00000000093 GiB"), (200_000, "0.00019 GiB"), (10 * 2**20, "0.0098 GiB"),
        (GIB // 2, "0.50 GiB"), (int(76.69 * GIB), "76.69 GiB"), (-(10 * 2**20), "-0.0098 GiB"),
    ],
)  # fmt: skip
def test_small_sizes_are_not_zero(count: int, text: str) -> None:
    assert gib(count) == text


@pytest.mark.parametrize("used", [0.99, 0.86, 1.0])
def test_a_full_gpu_says_what_is_in_use(used: float, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, falcon(vocab_size=300), tokenizer=False)
    gpu: GPUFacts = KNOWN["h100"]
    full = replace(gpu, free_bytes=int(gpu.total_bytes * (1 - used)))
    config = EngineConfig(str(path), device="cuda", load_format="dummy")
    with pretended(full), pytest.raises(MemoryBudgetError) as info:
        _, target = load_target(config, TPGroup())
        fit.plan_ahead(config, target, 300_000)
    said = str(info.value)
    assert "need 0.00 GiB" not in said and f"of its {gib(gpu.total_bytes)}" in said
    assert (
        f"{gib(int(gpu.total_bytes * 0.85))} may be taken and {gib(full.total_bytes - full.free_bytes)} are in use"
        in said
    )
    assert "a GPU that nothing else uses" in said and "a memory_fraction above 0.85" in said


def test_a_budget_below_zero_is_not_shown_as_one(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, falcon(vocab_size=300), tokenizer=False)
    config = EngineConfig(str(path), device="cpu", load_format="dummy")
    _, target = load_target(config, TPGroup())
    with pytest.raises(MemoryBudgetError, match=r"budget of 0 bytes \(500 bytes more are in use already\)"):
        fit.plan_ahead(config, target, 1, budget_bytes=-500)


def test_the_documents_say_what_was_measured() -> None:
    for name in ("README.md", "docs/prefix-cache.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert "the text does not change" not in text and "changes no text" not in text
        assert "bfloat16" in text and "of 24" in text and "benchmarks.text_changes" in text
