"""The killable process that first compiles each grammar, within limits of time and memory.

A thread that compiles cannot be ended. So a grammar is compiled twice: there under limits, then
here at a known cost.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hybridrt.base.errors import QueueFullError
from hybridrt.engine.grammar import compile_child

START_SECONDS = 120.0
_WRITE_SECONDS = 10.0
_CHILD = Path(compile_child.__file__)
_GONE = "the process that compiles grammars has ended: try again later"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of compiling a grammar.

    Attributes:
        error: why it cannot be used; "" if it can.
        late: the process was ended, because it had used up its CPU time.
        seconds: CPU time that compiling took.
    """

    error: str = ""
    late: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class _Running:
    """Has unanswered jobs by number. After it has `ended` it gets no more."""

    process: subprocess.Popen[bytes]
    jobs: dict[int, "Future[Verdict]"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False

    def kill_process(self) -> None:
        """Ends its forks too. Once it has ended, its number may be another's."""
        with suppress(ProcessLookupError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)


class CompileProcess:
    """Starts the process when it is first needed, and again after it has ended. Any thread may call
    it.

    Args:
        tokenizer: text of a tokenizer.json.
        vocab_size: tokens of the model; eos: tokens that end an output.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._command = [sys.executable, "-P", "-s", str(_CHILD), str(vocab_size), *map(str, sorted(eos))]
        self._numbers, self._lock = count(1), threading.Lock()
        self._running: _Running | None = None
        self._kill_at_end: weakref.finalize[[], CompileProcess] | None = None
        self._pid = os.getpid()
        self._closed = False

    def compile(self, grammar: str, cpu_seconds: float, seconds: float) -> Verdict:
        """Waits until the grammar is compiled, or its process has used up its CPU time.

        Raises:
            QueueFullError: the process does not start, has ended, or got too little CPU time in
                `seconds`.
        """
        running, job = self._started(), Future[Verdict]()
        with running.lock:
            if running.ended:
                raise QueueFullError(_GONE)
            number = next(self._numbers)
            running.jobs[number] = job
            try:
                _write(running.process, f"{number} {cpu_seconds} {seconds}\n{grammar}")
            except (OSError, TimeoutError) as e:
                running.kill_process()
                raise QueueFullError(_GONE) from e
        try:
            return job.result(seconds + _WRITE_SECONDS)
        except TimeoutError as e:  # neither it nor its fork answers
            running.kill_process()
            raise QueueFullError(_GONE) from e

    def close(self) -> None:
        """Ends the process and all that it compiles. Later calls raise QueueFullError."""
        with self._lock:
            self._closed = True
            if self._running is not None and self._pid == os.getpid():
                self._running.kill_process()

    def _started(self) -> _Running:
        with self._lock:
            if self._closed:
                raise QueueFullError("the engine has been closed: no grammar is compiled any more")
            if self._pid != os.getpid():  # a fork has its parent's
                self._running, self._pid = None, os.getpid()
            if self._running is None or self._running.ended:
                if self._kill_at_end is not None:
                    self._kill_at_end.detach()  # else it would keep the process that has ended
                self._running = self._start()
                self._kill_at_end = weakref.finalize(self, self._running.kill_process)
            return self._running

    def _start(self) -> _Running:
        try:
            # A session of its own: no Ctrl-C of the terminal, and all forks can be ended.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as e:
            raise QueueFullError(f"no process to compile a grammar ({e}): try again later") from e
        running = _Running(process)
        try:
            _write(process, "\n" + self._tokenizer, START_SECONDS)
            _wait_for_answer(process)
            threading.Thread(target=_read_answers, args=(running,), name="hybridrt-verdicts", daemon=True).start()
        except (OSError, EOFError, TimeoutError, RuntimeError) as e:
            running.kill_process()
            process.wait()
            raise QueueFullError(
                f"the process that compiles grammars does not start ({type(e).__name__}: {e}); try "
                f"{' '.join(self._command[:4])}"
            ) from e
        return running


def _wait_for_answer(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None, "it is a pipe"
    if not select.select([process.stdout], [], [], START_SECONDS)[0]:
        raise TimeoutError(f"it has not answered within {START_SECONDS:g} seconds")
    _read(process)


def _read_answers(running: _Running) -> None:
    with suppress(EOFError, OSError, ValueError):
        while True:
            number, status, text = _read(running.process)
            with running.lock:
                job = running.jobs.pop(number, None)
            if job is not None and (status, text) == ("!", compile_child.BUSY):
                job.set_exception(QueueFullError("the machine is too busy to compile a grammar: try again later"))
            elif job is not None:
                job.set_result(_verdict(status, text))
    running.kill_process()
    running.process.wait()
    with running.lock:
        running.ended = True
        left, running.jobs = [*running.jobs.values()], {}
        for pipe in (running.process.stdin, running.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet has no reader
                    pipe.close()
    for job in left:
        job.set_exception(QueueFullError(_GONE))


def _verdict(status: str, text: str) -> Verdict:
    if status.startswith("+"):
        return Verdict(seconds=float(status[1:]))
    if status == "!" and text == compile_child.TIME:
        return Verdict("compiling it takes too long", late=True)
    if status == "!":
        return Verdict(f"compiling it takes more than {compile_child.MAX_BYTES >> 20} MiB of memory; make it simpler")
    return Verdict(text or "it cannot be compiled")


def _write(process: subprocess.Popen[bytes], text: str, seconds: float = _WRITE_SECONDS) -> None:
    """Raises TimeoutError, or OSError if the process has ended."""
    assert process.stdin is not None, "it is a pipe"
    fd, deadline, data = process.stdin.fileno(), time.monotonic() + seconds, text.encode()
    left, poll = memoryview(len(data).to_bytes(4, "little") + data), select.poll()
    poll.register(fd, select.POLLOUT)
    os.set_blocking(fd, False)
    while left:
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError("it does not read")
        left = left[os.write(fd, left) :]


def _read(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    assert process.stdout is not None, "it is a pipe"
    head = process.stdout.read(4)
    data = process.stdout.read(int.from_bytes(head, "little"))
    if len(head) < 4 or b"\n" not in data:
        raise EOFError("it has ended")
    first, _, text = data.partition(b"\n")
    number, _, status = first.decode().partition(" ")
    return int(number), status, text.decode(errors="replace")
