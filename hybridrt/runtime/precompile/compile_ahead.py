"""Compiles the kernels of a configuration into Triton's cache, in processes next to the start.

A kernel takes a third of a second of one core, and a model launches some 60. While this process
reads weights, one child finds the kernels (`compile_trace.py`), and all children compile.
"""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from hybridrt.base.child_process import start_child
from hybridrt.base.device import GPUFacts, visible_gpus
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.providers import is_installed
from hybridrt.runtime.precompile.compile_mark import find_mark, has_marks, write_mark
from hybridrt.runtime.precompile.compile_worker import LAUNCHER
from hybridrt.runtime.precompile.cuda_start import start_cuda
from hybridrt.runtime.precompile.triton_key import TritonKey

logger = logging.getLogger(__name__)

WORKERS_VARIABLE = "HYBRIDRT_COMPILE_WORKERS"
MAX_WORKERS = 16
DEADLINE_S = 600.0
_LEAVING_S = 5.0
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # a CUDA context takes half a gigabyte of GPU memory
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "0",
    "TRITON_STORE_BINARY_ONLY": "1",  # a launch opens all files of a kernel: four instead of nine
    "HYBRIDRT_DEBUG": "",
}
WORKER = "hybridrt.runtime.precompile.compile_worker"

Kernel = list[str]  # the same as `compile_trace.Kernel`
Job = tuple[bool, Kernel]  # whether the start needs it


@dataclass
class CompileReport:
    """What was compiled.

    Attributes:
        kernels: how many, those already in the cache included.
        seconds: time of one core, by the kernel's name; "trace": time of finding them.
        problems: steps that could not be traced and kernels that do not compile, the same in every
            run.
        failures: processes that ended or took too long.
    """

    kernels: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class CompileAhead:
    """Processes that compile the kernels of a configuration. `wait` and `close` end them.

    They start at once, and compile after `start_compiling` has named the GPU.

    Args:
        config: configuration of the run; its model is a directory.
        workers: how many processes.
        key: Triton's key, for all of them.
    """

    def __init__(self, config: EngineConfig, workers: int, key: TritonKey) -> None:
        self.report = CompileReport()
        self._config, self._key, self._mark = config, key, Path()
        self._threads: list[threading.Thread] = []
        self._changed, self._jobs = threading.Condition(), queue.SimpleQueue[Job | None]()
        self._to_start, self._all_to_start, self._serving = 0, False, workers
        self._queue(list(LAUNCHER))
        self._processes: list[subprocess.Popen[bytes]] = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        try:
            for _ in range(workers):
                self._processes.append(start_child(WORKER, {}, ENVIRONMENT, **pipes))
        except BaseException:
            self.close()
            raise

    def start_compiling(self, gpu: GPUFacts) -> None:
        """Compiles for this GPU, in the background."""
        self._mark = find_mark(self._config, gpu)
        for i, process in enumerate(self._processes):
            thread = threading.Thread(target=self._serve, args=(process, gpu, i == 0), daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait_for_start(self, deadline_s: float = DEADLINE_S) -> None:
        """Returns when the kernels of the start are compiled, or cannot be."""
        with self._changed:
            ready = self._changed.wait_for(
                lambda: not self._serving or (self._all_to_start and not self._to_start), deadline_s
            )
        if not ready:
            self.report.failures.append(f"compiling took more than {deadline_s:g} seconds")
            self.close()

    def wait(self, deadline_s: float = DEADLINE_S) -> CompileReport:
        """Returns when every kernel is compiled, or cannot be. Warns of missing ones."""
        end, report = time.monotonic() + deadline_s, self.report
        try:
            for thread in self._threads:
                thread.join(max(end - time.monotonic(), 0.0))
            if any(thread.is_alive() for thread in self._threads):
                report.failures.append(f"compiling took more than {deadline_s:g} seconds")
        finally:
            self.close()
        for thread in self._threads:
            thread.join(_LEAVING_S)
        for problem in (*report.failures, *report.problems):
            logger.warning("kernels are missing in Triton's cache, and compiled when they are launched: %s", problem)
        if not report.failures:
            write_mark(self._mark, report.kernels)
        return report

    def close(self) -> None:
        """Ends the processes and their compilers at once."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # each has a session of its own
            process.wait()

    def _queue(self, job: Kernel) -> None:
        with self._changed:
            self._to_start += not self._all_to_start
        self._jobs.put((not self._all_to_start, job))

    def _serve(self, process: "subprocess.Popen[bytes]", gpu: GPUFacts, traces: bool) -> None:
        """Feeds one process, in a thread of its own: the trace if it traces, then kernels."""
        doing = "it started"
        try:
            try:
                _send(process, {"gpu": asdict(gpu)})
                if traces:
                    doing = "it traced the model"
                    self._trace(process)
            finally:
                if traces:  # the others wait for its kernels
                    self._know_start()
                    for _ in self._processes:
                        self._jobs.put(None)
            if (key := self._key.wait()) is not None:
                _send(process, {"key": key})
            while (job := self._jobs.get()) is not None:
                doing = f"it compiled {_name(job[1])}"
                try:
                    _send(process, {"compile": job[1]})
                    self._note(job[1], _read(process))
                finally:
                    with self._changed:
                        self._to_start -= job[0]
                        self._changed.notify_all()
        except (OSError, ValueError, msgspec.DecodeError) as e:
            with self._changed:
                self.report.failures.append(f"a process failed while {doing}: {_status(process) or e}")
        finally:
            with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    def _trace(self, process: "subprocess.Popen[bytes]") -> None:
        _send(process, {"trace": asdict(self._config)})
        while "problems" not in (answer := _read(process)):
            if "kernel" in answer:
                self._queue(answer["kernel"])
            else:
                self._know_start()
        with self._changed:
            self.report.problems += answer["problems"]
            self.report.seconds["trace"] = answer["seconds"]

    def _know_start(self) -> None:
        """The start does not need later kernels."""
        with self._changed:
            self._all_to_start = True
            self._changed.notify_all()

    def _note(self, job: Kernel, answer: dict[str, Any]) -> None:
        with self._changed:
            report, name = self.report, _name(job)
            report.kernels += 1
            report.seconds[name] = report.seconds.get(name, 0.0) + answer["seconds"]
            if answer["problem"] is not None:
                report.problems.append(f"{name} does not compile: {answer['problem']}")


def _name(job: Kernel) -> str:
    return f"{job[0].rpartition('.')[2]}.{job[1]}"


def _send(process: "subprocess.Popen[bytes]", request: dict[str, Any]) -> None:
    stdin: IO[bytes] | None = process.stdin
    assert stdin is not None
    stdin.write(msgspec.json.encode(request) + b"\n")
    stdin.flush()


def _read(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """DecodeError once the process has ended. `CompileAhead.wait` ends silent processes."""
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=dict[str, Any])


def _status(process: "subprocess.Popen[bytes]") -> str:
    try:
        return f"status {process.wait(_LEAVING_S)}"
    except subprocess.TimeoutExpired:
        return ""


def default_workers() -> int:
    """Processes to compile in: one per core except one, or the environment's number. 0: none.

    Raises:
        ConfigError: the environment's value is no such number.
    """
    text = os.environ.get(WORKERS_VARIABLE)
    if text is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return max(1, min(cores - 1, MAX_WORKERS))
    if not text.isdecimal() or int(text) > 1024:
        raise ConfigError(f"{WORKERS_VARIABLE} is {text!r}; it must be a number of processes from 0 to 1024")
    return int(text)


class KernelsAhead:
    """Compiles the kernels of a run next to its start: a context that waits for all of them at its
    end.

    The GPU's driver starts meanwhile. Nothing is compiled on a CPU, or if the cache has the kernels
    already. Rank 0 compiles for the ranks of its host.

    Args:
        workers: processes, where any are wanted; None: `default_workers`.
    """

    def __init__(self, config: EngineConfig, tp: TPGroup, workers: int | None = None) -> None:
        start_cuda(config.device, tp)
        self._config, self._tp, self._key = config, tp, TritonKey() if _launches(config) else None
        self._workers = workers
        self._ahead = _start(config, tp, self._key, workers)

    def start_compiling(self, device: torch.device, path: Path) -> None:
        """Called when the device and the model's directory are known."""
        if self._key is None or not _wanted(self._config, self._tp) or device.type != "cuda":
            return self.close()
        config, gpu = _of_run(self._config, path), GPUFacts.of_device(device)
        if find_mark(config, gpu).exists():
            return self.close()
        self._ahead = self._ahead or CompileAhead(config, self._workers or default_workers(), self._key)
        self._ahead.start_compiling(gpu)

    def wait_for_start(self) -> None:
        """Returns when Triton has its key and, on rank 0, the kernels that a start needs are
        compiled."""
        if self._key is not None:
            self._key.wait()
        if self._ahead is not None:
            self._ahead.wait_for_start()

    def __enter__(self) -> "KernelsAhead":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            if self._ahead is not None and error is None:
                logger.info("%d kernels are in Triton's cache", self._ahead.wait().kernels)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the processes at once."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _wanted(config: EngineConfig, tp: TPGroup) -> bool:
    """Does not ask the GPU's driver."""
    return _launches(config) and not tp.rank and default_workers() > 0


def _launches(config: EngineConfig) -> bool:
    """Does not ask the GPU's driver."""
    there = torch.version.cuda is not None and config.device != "cpu" and visible_gpus() > 0
    return there and is_installed("triton")


def _start(config: EngineConfig, tp: TPGroup, key: TritonKey | None, workers: int | None) -> CompileAhead | None:
    """None if the cache may have all kernels."""
    path = Path(config.model)
    if key is None or not _wanted(config, tp) or not (path / "config.json").is_file():
        return None
    if has_marks(_of_run(config, path)):
        return None
    return CompileAhead(_of_run(config, path), workers or default_workers(), key)


def _of_run(config: EngineConfig, path: Path) -> EngineConfig:
    return replace(config, model=str(path), device="cuda")
