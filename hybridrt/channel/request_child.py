"""A child process that answers requests within limits of time and memory: both of its sides.

The work may be hostile: pictures, templates of checkpoints. The child opens no files while it works.
A frame in its pipes is four bytes of length, then that many bytes. An answer begins with "+" before
a result, "-" before an error, or "!" before an error after which the child is replaced.
"""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, BinaryIO

import psutil

from hybridrt.base.child_process import start_child
from hybridrt.channel.control import disown_in_child

START_SECONDS = 120.0
MAX_BYTES = 2**32 - 1  # of a request
_LAST_SECONDS = 120  # of a request whose parent is gone
_ERROR_CHARACTERS = 1000
_KILL_AGAIN_SECONDS = 0.05
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
Parts = Sequence[bytes | memoryview]


class RequestRefusedError(Exception):
    """The work cannot be done. The text says why. Other errors are answered with their type's name."""


class ChildReplacedError(RequestRefusedError):
    """The work cannot be done, and the child can do no other: the next request starts another one."""


class ChildNotStartedError(Exception):
    """The module cannot be imported, or it takes more than START_SECONDS."""


class RequestChild:
    """The parent's side. One request at a time: threads wait for each other. Thread-safe.

    The process is started by `start` or the first request, and again after it was lost. A forked
    process starts one of its own.

    Args:
        module: its `main(**arguments)` calls `answer_requests`.
        arguments: plain data.

    Attributes:
        process: None: it does not run.
    """

    def __init__(self, module: str, arguments: Mapping[str, Any]) -> None:
        self._module, self._arguments = module, arguments
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()
        disown_in_child(self)

    def start(self) -> None:
        """Raises ChildNotStartedError."""
        with self._lock:
            self._running()

    def ask(self, request: bytes, seconds: float) -> memoryview:
        """The result for a request. `seconds`: from the first byte there to the last one back.

        Raises:
            RequestRefusedError: the child's error. ChildReplacedError: and its end.
            TimeoutError, EOFError: it has taken too long, or has ended. It is started anew by the
                next request.
            ChildNotStartedError.
        """
        if len(request) > MAX_BYTES:
            raise RequestRefusedError(f"it has {len(request)} bytes; there may be {MAX_BYTES}")
        with self._lock:
            child = self._running()
            deadline = time.monotonic() + seconds
            try:
                _write_frame(child, request, deadline)
                answer = memoryview(_read_frame(child, deadline))
            except OSError as e:
                self._end()
                raise e if isinstance(e, TimeoutError) else EOFError from e
            except BaseException:  # the next request must not read this answer
                self._end()
                raise
            if (status := bytes(answer[:1])) == b"+":
                return answer[1:]
            text = str(answer[1:], errors="replace")
            if status == b"-":
                raise RequestRefusedError(text)
            self._end()
            raise ChildReplacedError(text)

    def end(self) -> None:
        """Kills the process, also while it works. A later request starts another one."""
        while True:
            if (process := self.process) is not None:
                process.kill()
            # Again, because a request that has just got the lock may start another process.
            if self._lock.acquire(timeout=_KILL_AGAIN_SECONDS):
                break
        try:
            self._end()
        finally:
            self._lock.release()

    def disown(self) -> None:
        """In a forked process: the child is the parent's, and another thread may have held the lock."""
        self._lock, self.process = Lock(), None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self.process is not None and self.process.poll() is None:
            return self.process
        self._end()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = start_child(self._module, self._arguments, _ENVIRONMENT, **pipes)
        try:
            _read_frame(self.process, time.monotonic() + START_SECONDS)
        except (EOFError, TimeoutError) as e:
            self._end()
            raise ChildNotStartedError from e
        except BaseException:
            self._end()
            raise
        return self.process

    def _end(self) -> None:
        child, self.process = self.process, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None, "it is a pipe"
            with suppress(OSError):  # closing flushes what was written
                pipe.close()


def answer_requests(compute: Callable[[bytes], Parts], max_bytes: int | None) -> None:
    """The child's side. Returns when the parent closes its end.

    With a limit the child can open no files: call `compute` before for everything that imports a
    module.

    Args:
        compute: a request to its result.
        max_bytes: of memory, in addition to that of the process now. None: the work is our own and has
            no limits.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    if max_bytes is not None:
        limit = psutil.Process().memory_info().vms + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _answer(answers, [])
    while head := requests.read(4):
        request = requests.read(int.from_bytes(head, "little"))
        signal.setitimer(signal.ITIMER_REAL, _LAST_SECONDS)
        parts = _computed(compute, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answers, parts)


def _computed(compute: Callable[[bytes], Parts], request: bytes) -> Parts:
    try:
        return [b"+", *compute(request)]
    except MemoryError:  # any object may be incomplete
        return [b"!it needs too much memory (MemoryError)"]
    except ChildReplacedError as e:
        return [b"!" + _shortened(str(e))]
    except RequestRefusedError as e:
        return [b"-" + _shortened(str(e))]
    except BaseException as e:
        return [b"-" + _shortened(f"{type(e).__name__}: {e}")]


def _shortened(text: str) -> bytes:
    return text[:_ERROR_CHARACTERS].encode(errors="replace")


def _answer(stream: BinaryIO, parts: Parts) -> None:
    stream.write(sum(map(len, parts)).to_bytes(4, "little"))
    for part in parts:
        stream.write(part)
    stream.flush()


def _write_frame(child: "subprocess.Popen[bytes]", data: bytes, deadline: float) -> None:
    assert child.stdin is not None, "it is a pipe"
    fd, poll = child.stdin.fileno(), select.poll()
    poll.register(fd, select.POLLOUT)
    os.set_blocking(fd, False)
    for part in (len(data).to_bytes(4, "little"), data):
        left = memoryview(part)
        while left:
            _await(poll, deadline)
            left = left[os.write(fd, left) :]


def _read_frame(child: "subprocess.Popen[bytes]", deadline: float) -> bytearray:
    assert child.stdout is not None, "it is a pipe"
    fd = child.stdout.fileno()
    return _read(fd, int.from_bytes(_read(fd, 4, deadline), "little"), deadline)


def _read(fd: int, count: int, deadline: float) -> bytearray:
    data, poll = bytearray(), select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < count:
        _await(poll, deadline)
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data


def _await(poll: select.poll, deadline: float) -> None:
    if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        raise TimeoutError
