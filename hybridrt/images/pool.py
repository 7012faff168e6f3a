"""Child processes that decode pictures: one at a time each, replaced when they are lost."""

import os
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue

import msgspec
import numpy as np

from hybridrt.base.child_process import start_child
from hybridrt.base.errors import EngineError
from hybridrt.base.frames import end_child, read_frame, write_frame
from hybridrt.images.jobs import Decoded, Job, UnreadablePicture

START_SECONDS = 120.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class PoolLimits:
    """
    Attributes:
        seconds: for one picture, with its way to the process and back.
        max_bytes: memory of a process, in addition to that at its start.
        max_pixels: of a picture, as its header says.
    """

    children: int = max(1, min(4, (os.cpu_count() or 1) // 2))
    seconds: float = 20.0
    max_bytes: int = 1 << 30
    max_pixels: int = 2**25


class _Worker:
    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> "subprocess.Popen[bytes]":
        """Raises EngineError if the process does not start."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.end()
        arguments = {"max_bytes": self._limits.max_bytes}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._child = start_child("hybridrt.images.image_child", arguments, _ENVIRONMENT, **pipes)
        try:
            read_frame(self._child, START_SECONDS)
        except (EOFError, TimeoutError) as e:
            self.end()
            raise EngineError("the process that decodes images does not start; try `import hybridrt, PIL`") from e
        return self._child

    def read(self, job: bytes) -> bytearray:
        """The child's answer. Raises UnreadablePicture if there is none."""
        child = self.start()
        try:
            write_frame(child, job, self._limits.seconds)
            answer = read_frame(child, self._limits.seconds)
        except TimeoutError as e:
            self.end()
            raise UnreadablePicture(f"decoding takes more than {self._limits.seconds:g} seconds") from e
        except (EOFError, OSError) as e:
            self.end()
            raise UnreadablePicture("decoding it has ended its process") from e
        except BaseException:  # the next call must not read this answer
            self.end()
            raise
        if answer[:1] == b"!":
            self.end()
        return answer

    def end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end_child(child)


class ImagePool:
    """Child processes, started by the first pictures or by `start`. Thread-safe."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self._workers = [_Worker(limits) for _ in range(limits.children)]
        self._idle = LifoQueue[_Worker]()
        for worker in self._workers:
            self._idle.put(worker)
        self.threads = ThreadPoolExecutor(limits.children, thread_name_prefix="hybridrt-image")
        self._end = weakref.finalize(self, _end_all, self._workers, self.threads)

    def start(self) -> None:
        """Starts all processes before they are needed. EngineError if one does not start."""
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        self._end()

    def decode(self, job: Job) -> tuple[np.ndarray, bytes]:
        """[h, w, 3] uint8 and a digest of a picture. Blocks until a process is free.

        Raises:
            UnreadablePicture: it cannot be decoded. EngineError: no process starts.
        """
        worker = self._idle.get()
        try:
            answer = worker.read(msgspec.msgpack.encode(job))
        finally:
            self._idle.put(worker)
        if answer[:1] != b"+":
            raise UnreadablePicture(answer[1:].decode(errors="replace"))
        start = 5 + int.from_bytes(answer[1:5], "little")
        facts = msgspec.msgpack.decode(answer[5:start], type=Decoded)
        pixels = np.frombuffer(answer, np.uint8, facts.height * facts.width * 3, start)
        return pixels.reshape(facts.height, facts.width, 3), facts.digest


def _end_all(workers: list[_Worker], threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.end()
