"""The processes of a tensor-parallel run: torchrun's, or ranks that are started here, watched, and let go."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch
import torch.distributed as dist

from hybridrt.distributed.groups import CONNECTING, Communicator
from hybridrt.errors import ConfigError, HybridrtError, RankError

LOST = 75  # exit status of a rank that ended because another one did
NAMING_S = 5.0  # a process ends a moment after its connections do
LEAVING_S = 30.0
LOOPBACK = "127.0.0.1"
_LOST = "tensor-parallel rank {} was lost: {}; build a new LLM"


class Ranks:
    """The other ranks, as rank 0 sees them.

    Args:
        processes: ranks 1, 2, ... if they were started here; none under torchrun, which watches them itself.
    """

    def __init__(self, comm: Communicator, processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.comm = comm
        self._processes = processes
        self._error: RankError | None = None
        self._lock, self._named = threading.Lock(), threading.Event()
        self._serving = self._leaving = False
        for rank, process in enumerate(processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def check(self) -> None:
        """Raises RankError if a rank was lost; its text names it."""
        if self._error is not None:
            raise RankError(str(self._error))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do alike: what is raised inside leaves them out of step and ends the others. Where it
        is the loss of a rank, the RankError names it."""
        self.check()
        try:
            yield
        except BaseException as e:
            lost = self._lost(e)
            self._fail(_LOST.format(0, f"{type(e).__name__}: {e}"))
            if lost is not None:
                raise lost from e
            raise

    def begin(self, message: object) -> None:
        """Tells the others what to serve; ConfigError if they serve something already."""
        if self._serving:
            raise ConfigError("these tensor-parallel ranks serve another LLM: close that one first")
        with self.together():
            self.comm.send(message)
        self._serving = True

    def end(self) -> None:
        """The others stop serving and have freed what they held when this returns."""
        if self._serving and self._error is None:
            with suppress(RankError):  # a rank that is lost holds nothing either
                self.comm.send(None)
                self.comm.barrier()
        self._serving = False

    def close(self) -> None:
        """Lets the others leave. Closing again does nothing."""
        if self._leaving:
            return
        self.end()
        self._leaving = True
        if self._error is None:
            with suppress(RankError):
                self.comm.send(None)
        self._end_processes(LEAVING_S if self._error is None else 0.0)
        self.comm.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._leaving and status != LOST:
            ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self._fail(_LOST.format(rank, self._reason(rank) or f"its process {ending}"))

    def _lost(self, e: BaseException) -> RankError | None:
        """What to raise in place of `e`, if `e` is only what the loss of a rank looks like from here."""
        if isinstance(e, RankError):
            self._named.wait(NAMING_S if self._processes else 0.0)
            return self._error or self._reported()
        return self._error if isinstance(e, Exception) and not isinstance(e, HybridrtError) else None

    def _reported(self) -> RankError | None:
        """The failure that a rank left behind: torchrun's processes are not watched from here."""
        reasons = {rank: reason for rank in range(1, self.comm.size) if (reason := self._reason(rank))}
        return next((RankError(_LOST.format(*item)) for item in reasons.items()), None)

    def _reason(self, rank: int) -> str | None:
        """What a rank left behind when it failed."""
        key = failure_key(rank)
        return self.comm.store.get(key).decode() if self.comm.store.check([key]) else None

    def _fail(self, reason: str) -> None:
        """The first failure counts. The others end, and what waits for them on this rank's GPU is freed."""
        with self._lock:
            if self._error is not None:
                return
            self._error = RankError(reason)
        self._named.set()
        self._end_processes(0.0)
        self.comm.abort()

    def _end_processes(self, grace_s: float) -> None:
        for process in self._processes:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()


def failure_key(rank: int) -> str:
    """Where in the store a rank says why it ends."""
    return f"hybridrt/failed/{rank}"


def presence_key(rank: int) -> str:
    """What a rank that was started here sets once it runs."""
    return f"hybridrt/here/{rank}"


def rank_device(kind: str) -> torch.device:
    """This process's device, of `kind` "cpu" or "cuda"."""
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)


def start_ranks(size: int, kind: str) -> Ranks:
    """Starts ranks 1 to `size` - 1 on this machine, as processes that end with this one.

    Raises:
        RankError: one of them ended before it came up.
    """
    store = dist.TCPStore(LOOPBACK, 0, size, is_master=True, wait_for_workers=False)
    processes = [_start(rank, size, store.port, kind) for rank in range(1, size)]
    try:
        _await(store, processes)
        return Ranks(Communicator(store, 0, size, rank_device(kind)), processes)
    except BaseException:
        for process in processes:
            process.kill()
            process.communicate()
        raise


def _start(rank: int, size: int, port: int, kind: str) -> "subprocess.Popen[bytes]":
    """An interpreter of its own, not multiprocessing: that would run the caller's main module once more."""
    environment = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port,
        # As many threads as here: how a sum is split decides its last bits, and every rank samples for itself.
        "OMP_NUM_THREADS": torch.get_num_threads(),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "hybridrt.runtime.follower", kind],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        stdin=subprocess.PIPE,  # the rank ends when this process no longer holds the other end
        start_new_session=True,  # an interrupt at the terminal is for rank 0 alone
    )


def _await(store: dist.Store, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    keys = [presence_key(rank) for rank in range(1, len(processes) + 1)]
    while not store.check(keys):
        for rank, process in enumerate(processes, 1):
            if process.poll() is not None:
                raise RankError(
                    f"tensor-parallel rank {rank} did not start: status {process.returncode}; see its output"
                )
        time.sleep(0.02)


def world_size() -> int | None:
    """How many processes torchrun started, this one among them; None if it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


@cache
def torchrun_communicator(kind: str) -> Communicator:
    """The group of torchrun's processes, one for the life of this process."""
    store, rank, size = next(dist.rendezvous("env://", timeout=CONNECTING))
    return Communicator(store, rank, size, rank_device(kind))


@cache
def torchrun_ranks(kind: str) -> Ranks:
    """Rank 0's view of torchrun's processes; they leave when this process ends."""
    ranks = Ranks(torchrun_communicator(kind))
    atexit.register(ranks.close)
    return ranks
