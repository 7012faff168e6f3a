"""Processes that compile: they share the work, and however one of them ends, no other waits for ever."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import cache

from hybridrt.base.child_process import start_child
from hybridrt.base.device import KNOWN, GPUFacts, known_gpu
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError
from hybridrt.base.plugins import load_object
from hybridrt.collectives.groups import TPGroup
from hybridrt.parallel import rank_start
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.precompile import compile_ahead
from hybridrt.runtime.precompile.compile_ahead import CompileAhead, KernelsAhead, default_workers
from hybridrt.runtime.precompile.compile_mark import find_mark, write_mark
from hybridrt.runtime.precompile.pretend_gpu import pretended
from hybridrt.runtime.precompile.triton_key import TritonKey, use_key
from hybridrt.runtime.run import model_runner
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.speculative.method import make_drafter
from tests.support.tiny import write_tiny

GPU = KNOWN["h200"]
KEY: Any = SimpleNamespace(wait=lambda: ("a file", "a digest"))
# A worker whose kernels are names: what one of them does stands in it.
WORKER = """
import json, os, sys, time
def say(**answer): print(json.dumps(answer), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "gpu" in request: pass
    elif "key" in request: key = request["key"]
    elif "trace" in request:
        for name in NAMES:
            say(kernel=["hybridrt.kernels.a", name, ""])
            if name == "die early": os._exit(3)
            if name == "last": say(started=0.1)
        say(problems=["a step: ValueError: no"] if "odd step" in NAMES else [], seconds=0.2)
    else:
        name = request["compile"][1]
        if name == "die": os._exit(7)
        if name == "hang": time.sleep(60)
        if name == "babble": print("no JSON", flush=True)
        say(problem="it is bad" if name == "bad" else key if name == "key?" else None, seconds=0.5)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return EngineConfig(str(write_tiny(tmp_path / "model", tokenizer=False)), device="cuda")


@pytest.fixture
def start(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CompileAhead]:
    """Two processes that find kernels of these names."""

    def started(*names: str) -> CompileAhead:
        def child(module: str, arguments: Any, environment: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
            assert environment["CUDA_VISIBLE_DEVICES"] == "" and environment["TRITON_INTERPRET"] == "0"
            script = WORKER.replace("NAMES", repr(names))
            return subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True, **options)

        monkeypatch.setattr(compile_ahead, "start_child", child)
        ahead = CompileAhead(config, 2, KEY)
        ahead.start_compiling(GPU)
        return ahead

    return started


def ended(ahead: CompileAhead) -> bool:
    return all(process.poll() is not None for process in ahead._processes)


def test_every_kernel_is_compiled_once_and_the_cache_is_marked(
    start: Callable[..., CompileAhead], config: EngineConfig
) -> None:
    assert not find_mark(config, GPU).exists()
    ahead = start("x", "y", "y", "z")
    report = ahead.wait()
    assert report.kernels == 5 and report.problems == report.failures == [] and ended(ahead)
    assert report.seconds == {"a.x": 0.5, "a.y": 1.0, "a.z": 0.5, "triton.launcher": 0.5, "trace": 0.2}
    assert find_mark(config, GPU).read_text() == "5\n"


@pytest.mark.parametrize(
    ("names", "kernels", "problem"),
    [
        (("x", "die", "y", "z"), 4, "a process failed while it compiled a.die: status 7"),
        (("x", "die early", "y"), 3, "a process failed while it traced the model: status 3"),
        (("x", "babble"), 2, "a process failed while it compiled a.babble: "),
        (("x", "bad", "y"), 4, "a.bad does not compile: it is bad"),
        (("x", "key?"), 3, "a.key? does not compile: ['a file', 'a digest']"),
        (("x", "odd step"), 3, "a step: ValueError: no"),
    ],
)
def test_what_is_missing_is_warned_of(
    names: tuple[str, ...], kernels: int, problem: str, start: Callable[..., CompileAhead], config: EngineConfig,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(compile_ahead, "_LEAVING_S", 0.2)
    ahead = start(*names)
    report = ahead.wait(20.0)
    (found,) = report.failures + report.problems
    assert ended(ahead) and found.startswith(problem) and report.kernels == kernels
    assert problem in caplog.text and "compiled when they are launched" in caplog.text
    assert find_mark(config, GPU).exists() == (not report.failures)  # what fails in every run is not tried in every run
    assert bool(report.failures) == found.startswith("a process")


def test_a_process_that_hangs_is_not_waited_for(start: Callable[..., CompileAhead]) -> None:
    begun = time.monotonic()
    ahead = start("x", "hang", "y")
    failures = ahead.wait(1.0).failures
    assert ended(ahead) and time.monotonic() - begun < 20
    assert failures[0] == "compiling took more than 1 seconds" and "a.hang: status -9" in failures[1]


def test_a_start_waits_for_its_own_kernels_alone(start: Callable[..., CompileAhead]) -> None:
    ahead = start("x", "y", "last", "hang", "hang")
    ahead.wait_for_start(20.0)
    assert {"a.x", "a.y", "a.last", "triton.launcher"} <= ahead.report.seconds.keys() and not ended(ahead)
    ahead.close()


@pytest.mark.parametrize("names", [("die", "die", "die"), ("die early",)])
def test_a_start_does_not_wait_for_processes_that_died(
    names: tuple[str, ...], start: Callable[..., CompileAhead]
) -> None:
    ahead = start(*names)
    ahead.wait_for_start(20.0)
    assert ahead.wait(20.0).failures and ended(ahead)


def test_a_start_that_takes_too_long_goes_on(start: Callable[..., CompileAhead]) -> None:
    ahead = start("hang", "x", "hang")
    ahead.wait_for_start(0.5)
    assert ended(ahead) and ahead.wait().failures[0] == "compiling took more than 0.5 seconds"


def test_an_interrupt_ends_the_processes(
    start: Callable[..., CompileAhead], config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = start("hang", "hang")
    monkeypatch.setattr(compile_ahead, "_start", lambda *_: ahead)
    with pytest.raises(KeyboardInterrupt), KernelsAhead(config, TPGroup()):
        raise KeyboardInterrupt
    assert ended(ahead)


class Started:
    """In the place of CompileAhead."""

    def __init__(self) -> None:
        self.made, self.calls = 0, list[str]()

    def __call__(self, config: EngineConfig, workers: int, key: object) -> Any:
        assert key is KEY
        self.made += 1
        return SimpleNamespace(
            **{name: lambda *_, name=name: self.calls.append(name) for name in ("start_compiling", "close")}
        )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """A machine with a GPU."""
    found = Started()
    monkeypatch.setattr(compile_ahead, "CompileAhead", found)
    monkeypatch.setattr(compile_ahead, "TritonKey", lambda: KEY)
    monkeypatch.setattr(GPUFacts, "of_device", lambda device: GPU)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("HYBRIDRT_COMPILE_WORKERS", raising=False)
    return found


CUDA = torch.device("cuda", 0)


def test_processes_start_before_the_gpu_is_known(config: EngineConfig, started: Started) -> None:
    kernels = KernelsAhead(config, TPGroup())
    assert started.made == 1 and started.calls == []
    kernels.start_compiling(CUDA, Path(config.model))
    assert started.made == 1 and started.calls == ["start_compiling"]


def test_nothing_starts_where_nothing_is_missing(
    config: EngineConfig, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(config.model)
    KernelsAhead(replace(config, device="cpu"), TPGroup()).start_compiling(torch.device("cpu"), path)
    KernelsAhead(config, TPGroup(1, 2)).start_compiling(CUDA, path)
    monkeypatch.setenv("HYBRIDRT_COMPILE_WORKERS", "0")
    KernelsAhead(config, TPGroup()).start_compiling(CUDA, path)
    monkeypatch.delenv("HYBRIDRT_COMPILE_WORKERS")
    write_mark(find_mark(replace(config, seed=7), replace(GPU, free_bytes=5)), 3)  # kernels depend on neither
    KernelsAhead(config, TPGroup()).start_compiling(CUDA, path)
    assert started.made == 0


def test_kernels_for_another_gpu_are_no_kernels(config: EngineConfig, started: Started) -> None:
    write_mark(find_mark(config, replace(GPU, multiprocessors=1)), 3)
    kernels = KernelsAhead(config, TPGroup())
    assert started.made == 0
    kernels.start_compiling(CUDA, Path(config.model))
    KernelsAhead(replace(config, state_mode="classic"), TPGroup())
    assert started.made == 2 and started.calls == ["start_compiling"]


def test_the_start_waits_for_the_key_of_triton(
    config: EngineConfig, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU: the first launch would compute it once more."""
    waited: list[str] = []
    key = SimpleNamespace(wait=lambda: waited.append("for it"))
    monkeypatch.setattr(compile_ahead, "TritonKey", lambda: key)
    KernelsAhead(replace(config, device="cpu"), TPGroup()).wait_for_start()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    KernelsAhead(config, TPGroup()).wait_for_start()
    assert waited == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("HYBRIDRT_COMPILE_WORKERS", "0")
    KernelsAhead(config, TPGroup()).wait_for_start()
    assert waited == ["for it"]


def test_processes_end_where_there_is_no_gpu_after_all(config: EngineConfig, started: Started) -> None:
    KernelsAhead(config, TPGroup()).start_compiling(torch.device("cpu"), Path(config.model))
    assert started.made == 1 and started.calls == ["close"]


def test_the_key_of_triton_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And taken from another process for the same Triton alone."""
    monkeypatch.setattr(cache, "triton_key", lambda: "computed")
    file, key = TritonKey().wait() or ("", "")
    assert (file, key) == (triton.__file__, "computed")
    use_key("/another/triton/__init__.py", "other")
    assert cache.triton_key() == "computed"
    use_key(file, "given")
    assert cache.triton_key() == "given"


def test_a_key_that_cannot_be_computed_is_left_to_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache, "triton_key")
    assert TritonKey().wait() is None


@pytest.mark.parametrize("text", ["many", "-1", "1e9", "99999"])
def test_a_number_of_processes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRIDRT_COMPILE_WORKERS", raising=False)
    assert 1 <= default_workers() <= 16
    monkeypatch.setenv("HYBRIDRT_COMPILE_WORKERS", text)
    with pytest.raises(ConfigError, match="HYBRIDRT_COMPILE_WORKERS"):
        default_workers()


def test_a_gpu_that_is_not_there() -> None:
    there = torch.cuda.is_available()
    with pretended(GPU):
        x = torch.empty(4, 6, device="cuda", dtype=torch.bfloat16)
        assert x.is_cuda and x.device == torch.device("cuda", 0) and torch.cuda.is_available()
        assert torch.cuda.mem_get_info() == (GPU.free_bytes, GPU.total_bytes)
        host = torch.zeros(6, dtype=torch.int32, pin_memory=True)
        assert not host.is_cuda and host.to("cuda").is_cuda and torch.arange(3, device=x.device).is_cuda
        assert torch.ones(6, dtype=torch.int32).copy_(x[0], non_blocking=True).tolist() == [1] * 6
        assert x[1:, 2:].storage_offset() == 8
    assert torch.cuda.is_available() == there
    with pytest.raises(ConfigError, match="known are h100, h200"):
        known_gpu("b300")


class Noting:
    """Compiles nothing, and writes down what it is told."""

    def __init__(self, config: EngineConfig, tp: TPGroup) -> None:
        NOTED.append(config.model)

    def start_compiling(self, device: torch.device, path: Path) -> None:
        NOTED.append(f"begin on {device}")

    def wait_for_start(self) -> None:
        NOTED.append("wait")

    def __enter__(self) -> "Noting":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        NOTED.append("end" if error is None else "error")


NOTED: list[str] = []


def test_a_start_compiles_next_to_its_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a draft model too. What comes after the weights may launch kernels, once all ranks are there."""
    NOTED.clear()
    models = [str(write_tiny(tmp_path / name, tokenizer=False)) for name in ("a", "b")]
    build, allocate = model_runner.build_model, Runtime.allocate
    monkeypatch.setattr(model_runner, "build_model", lambda *given: NOTED.append("weights") or build(*given))
    monkeypatch.setattr(Runtime, "allocate", lambda *given: NOTED.append("pools") or allocate(*given))
    monkeypatch.setattr(TPGroup, "minimum", lambda _, value: NOTED.append("all ranks") or value)
    config = EngineConfig(
        models[0], device="cpu", load_format="dummy", max_model_len=64, max_running_requests=2,
        speculative=SpeculativeConfig("draft", draft_model=models[1]),
    )  # fmt: skip
    runner = ModelRunner(config, ahead=Noting)
    first, last = ["begin on cpu", "weights", "wait", "all ranks"], ["pools", "end"]
    assert [models[0], *first, "all ranks", *last] == NOTED  # they agree on a memory plan
    NOTED.clear()
    make_drafter(runner)
    assert [models[1], *first, *last] == NOTED
    NOTED.clear()
    with pytest.raises(ConfigError):
        ModelRunner(replace(config, model=str(tmp_path)), ahead=Noting)
    assert [str(tmp_path), "error"] == NOTED


def test_other_ranks_find_it_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str | None] = []

    def start(module: str, arguments: dict[str, Any], *_: object, **__: object) -> None:
        given.append(arguments["ahead"])
        raise InterruptedError

    monkeypatch.setattr(rank_start, "start_child", start)
    for ahead in (KernelsAhead, None):
        with pytest.raises(InterruptedError):
            rank_start.start_ranks(2, "cpu", ahead)
    assert given == ["hybridrt.runtime.precompile.compile_ahead:KernelsAhead", None]
    assert load_object(str(given[0])) is KernelsAhead
    for ahead in (lambda *_: KernelsAhead(*_), partial(KernelsAhead)):
        with pytest.raises(ConfigError, match="other ranks find it by name"):
            rank_start.start_ranks(2, "cpu", ahead)


@pytest.mark.slow
def test_a_worker_ends_quietly_when_nobody_reads_its_answers():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start_child(compile_ahead.WORKER, {}, {}, **pipes) as worker:
        worker.stdout.close()
        requests = {"gpu": asdict(GPU)}, {"trace": {"model": "missing", "speculative": None}}
        _, messages = worker.communicate("".join(json.dumps(r) + "\n" for r in requests).encode(), timeout=100)
    assert (worker.returncode, messages) == (1, b"")
