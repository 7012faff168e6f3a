"""Whether a model fits: what control groups leave of main memory, and what is said before a weight is read."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hybridrt import LLM, EngineConfig
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.collectives.groups import TPGroup
from hybridrt.runtime.load import fit, host_memory
from hybridrt.runtime.load.fit import plan_ahead
from hybridrt.runtime.load.host_memory import free_host_memory, total_host_memory
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.run import model_runner
from tests.support.checkpoints import falcon
from tests.support.tiny import write_tiny

MIB = 2**20
Groups = Callable[..., None]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Writes a membership file and the files of groups, and points `host_memory` at them."""

    def make(membership: str, **folders: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(membership)
        for folder, files in folders.items():
            place = tmp_path / "fs" / folder.replace("__", "/").strip("_")
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).write_text(text)
        monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "fs")
        monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "cgroup")

    return make


def v2(limit: str, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 7\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def v1(limit: int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def test_a_limit_of_the_unified_hierarchy_counts(groups: Groups) -> None:
    groups("0::/jobs/a\n", jobs__a=v2(str(40 * MIB), 10 * MIB, cache=4 * MIB))
    assert free_host_memory() == 34 * MIB, "page cache can be dropped"
    assert total_host_memory() == 40 * MIB


def test_the_tightest_of_the_groups_around_counts(groups: Groups) -> None:
    groups("0::/jobs/a\n", jobs__a=v2("max", 10 * MIB), jobs=v2(str(30 * MIB), 12 * MIB), _=v2(str(90 * MIB), 0))
    assert (free_host_memory(), total_host_memory()) == (18 * MIB, 30 * MIB)


def test_a_limit_of_version_1_counts(groups: Groups) -> None:
    groups("5:cpu:/x\n4:memory:/jobs/a\n0::/\n", memory__jobs__a=v1(50 * MIB, 20 * MIB, cache=5 * MIB))
    assert (free_host_memory(), total_host_memory()) == (35 * MIB, 50 * MIB)


def test_a_container_sees_its_limit_at_the_root(groups: Groups) -> None:
    """Its path is the host's, of which nothing is mounted."""
    groups("4:memory:/docker/0123\n", memory=v1(50 * MIB, 20 * MIB))
    assert free_host_memory() == 30 * MIB


@pytest.mark.parametrize("used", [60 * MIB, 50 * MIB])
def test_a_group_that_is_full_leaves_nothing(groups: Groups, used: int) -> None:
    groups("0::/a\n", a=v2(str(50 * MIB), used))
    assert free_host_memory() == 0


def test_without_limits_the_machine_counts(groups: Groups) -> None:
    groups("4:memory:/a\n0::/b\n", memory__a=v1(2**63 - 4096, MIB), b=v2("max", MIB))
    assert total_host_memory() == psutil.virtual_memory().total
    assert 0 < free_host_memory() <= total_host_memory()


def test_a_machine_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "none")
    assert total_host_memory() == psutil.virtual_memory().total


@pytest.mark.parametrize("size, budget", [(1, 10), (2, 5), (4, 2.5)])
def test_the_budget_of_pools_respects_control_groups_and_is_shared_by_ranks(
    groups: Groups, size: int, budget: float
) -> None:
    groups("0::/a\n", a=v2(str(50 * MIB), 10 * MIB))
    target: Any = SimpleNamespace(device=torch.device("cpu"), tp=TPGroup(size=size))
    assert fit.pool_budget(EngineConfig("any"), target) == budget * MIB


def test_weights_that_do_not_fit_are_refused_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(model_runner, "build_model", refuse)
    monkeypatch.setattr(fit, "free_host_memory", lambda: 200_000)
    with pytest.raises(MemoryBudgetError, match=r'the weights need .* GiB, and cpu has .* use .*dtype="bfloat16"'):
        LLM(str(write_tiny(tmp_path)), device="cpu")


def test_pools_that_do_not_fit_are_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(model_runner, "build_model", refuse)
    with pytest.raises(MemoryBudgetError, match="the pools' budget"):
        LLM(str(write_tiny(tmp_path)), device="cpu", max_running_requests=10**7)


def test_a_model_of_absurd_size_is_refused_without_allocating(tmp_path: Path) -> None:
    """Weights of 2**20 numbers squared, and a rotary table of 2**24 rows: both are only counted."""
    wide = write_tiny(tmp_path / "wide", falcon(hidden_size=2**20, intermediate_size=2**20), tokenizer=False)
    with pytest.raises(MemoryBudgetError, match="the weights need"):
        LLM(str(wide), device="cpu", load_format="dummy")
    long = falcon(max_position_embeddings=2**24, head_dim=2**12, num_hidden_layers=1)
    with pytest.raises(MemoryBudgetError, match="smaller max_model_len"):
        LLM(str(write_tiny(tmp_path / "long", long, tokenizer=False)), device="cpu", load_format="dummy")


def test_ranks_share_the_memory_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "free_host_memory", lambda: 2**30)
    path = str(write_tiny(tmp_path))
    for size in (1, 2):
        config = EngineConfig(path, device="cpu", tp_size=size)
        _, target = load_target(config, TPGroup(size=size))
        assert plan_ahead(config, target, 2**20).budget_bytes == (2**30 // size - 2**20) // 4


def test_freed_memory_goes_back_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc keeps it. Another C library has no such call."""
    calls = list[str]()
    library = SimpleNamespace(malloc_trim=lambda pad: calls.append(f"trim {pad}"))
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: library)
    path = write_tiny(tmp_path / "model", tokenizer=False)
    config = EngineConfig(str(path), device="cpu", load_format="dummy", max_model_len=32, max_running_requests=1)
    model_runner.ModelRunner(config)
    assert calls == ["trim 0"]
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    host_memory.return_freed_memory()
