"""Rank 0's view of the other ranks: sends them tasks, watches them and ends them."""

import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hybridrt.base.child_process import ending_of, is_stopped
from hybridrt.base.errors import ConfigError, HybridrtError, PeerGoneError, RankError
from hybridrt.channel.codec import unpack
from hybridrt.channel.control import LOADING_S, TIMEOUT_S, Link, disown_in_child
from hybridrt.collectives.groups import CHECK, Communicator
from hybridrt.parallel.messages import FromRank, RankFailed, encode
from hybridrt.parallel.torchrun import master_host

ENDED_WITH_ANOTHER = 75  # ended with another rank
NAMING_S = 5.0  # a process may end later than its connections
LEAVING_S = 30.0
LOOPBACK = "127.0.0.1"
_LOST = "tensor-parallel rank {} was lost: {}; build a new LLM"


class Ranks:
    """The other ranks, as rank 0 sees them.

    Args:
        links: to ranks 1, 2, ...
        processes: the ranks started here; none under torchrun, which watches its own.
        directory: where the ranks found each other; `close` removes it.
        timeout: seconds after which a silent rank counts as lost; LOADING_S at least while `loading`, unless
            its process was stopped.

    Attributes:
        loading: the ranks load a model.
    """

    def __init__(
        self,
        links: Sequence[Link],
        processes: Sequence["subprocess.Popen[bytes]"] = (),
        directory: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._comm: Communicator | None = None
        self._links, self._processes, self._directory = links, processes, directory
        self._timeout, self._pid = timeout, os.getpid()
        self._error: RankError | None = None
        self._lock, self._named = threading.Lock(), threading.Event()
        self._serving = self._leaving = self.loading = False
        disown_in_child(self)
        for rank, link in enumerate(links, 1):
            threading.Thread(target=self._read_messages, args=(rank, link), daemon=True).start()

    def meet(self, communicator: Callable[[Callable[[], None]], Communicator]) -> None:
        """Makes this rank's communicator, while the others make theirs, and opens its connections.

        In a thread, because these calls of torch wait for minutes for a rank that is gone.

        Args:
            communicator: makes it, given what it calls while it waits for the others.

        Raises:
            RankError: a rank was lost. The thread aborts what it has made as soon as torch lets it.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def meet() -> None:
            try:
                self._comm = comm = communicator(self.check_alive)
                try:
                    self.check_alive()
                    comm.connect()
                except BaseException:
                    comm.abort()  # who found the lost rank may have come before `_comm` was there
                    raise
                done.put(None)
            except BaseException as e:
                done.put(e)

        with self.together():
            threading.Thread(target=meet, daemon=True).start()
            while True:
                self.check_alive()
                try:
                    error = done.get(timeout=CHECK.total_seconds())
                    break
                except queue.Empty:
                    continue
            if error is not None:
                raise error

    @property
    def comm(self) -> Communicator:
        """This rank's, once they have met."""
        assert self._comm is not None, "the ranks have not met"
        return self._comm

    @property
    def host(self) -> str:
        """The address of this rank for the others: loopback if all of them run on this host."""
        return LOOPBACK if self._directory is not None else master_host()

    @property
    def here(self) -> bool:
        """False in a process that was forked from the one that leads the ranks."""
        return os.getpid() == self._pid

    def check_alive(self) -> None:
        """RankError that names the rank, if one was lost."""
        if self._error is not None:
            raise RankError(str(self._error))

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work that all ranks do alike.

        After an exception in it the ranks differ in state, so the other ranks are ended. If a lost
        rank caused the exception, the RankError that is raised names it.
        """
        self.check_alive()
        try:
            yield
        except BaseException as e:
            lost = self._lost_rank(e)
            self._fail(0, f"{type(e).__name__}: {e}")
            if lost is not None:
                raise lost from e
            raise

    def send(self, message: bytes) -> None:
        """Sends to every other rank. RankError if one cannot be reached."""
        for rank, link in enumerate(self._links, 1):
            try:
                link.send(message)
            except PeerGoneError as e:
                raise RankError(_LOST.format(rank, e)) from e

    def start_service(self, message: object, before: object | None = None) -> None:
        """Tells the others what to serve, and something `before`; ConfigError if they serve something
        already."""
        if self._serving:
            raise ConfigError("these tensor-parallel ranks serve another LLM: close that one first")
        encoded = [encode(each) for each in (before, message) if each is not None]
        with self.together():
            for each in encoded:
                self.send(each)
        self._serving = self.loading = True

    def end_service(self) -> None:
        """Stops the service. Returns when the others have freed what they held."""
        if self._serving and self._error is None:
            with suppress(RankError):  # a lost rank holds nothing
                self.send(encode(None))
                self.comm.barrier()
        self._serving = False

    def close(self) -> None:
        """Lets the others leave. May be repeated."""
        if self._leaving:
            return
        self.end_service()
        self._leaving = True
        if self._error is None:
            with suppress(RankError):
                self.send(encode(None))
        self._end_processes(LEAVING_S if self._error is None else 0.0)
        self.comm.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def disown(self) -> None:
        """In a forked child: the ranks and what waits for them belong to the parent."""
        self._error = RankError(
            f"this LLM belongs to process {self._pid}, from which this one was forked; build a new LLM here"
        )
        self._links, self._processes, self._directory, self._leaving = (), (), None, True

    def _read_messages(self, rank: int, link: Link) -> None:
        """Runs in a thread. If the rank fails or is lost, ends the others."""
        try:
            while messages := link.listen_to(self._timeout, self._patience, lambda: self._is_stopped(rank)):
                for message in (unpack(data, FromRank) for data in messages):
                    if isinstance(message, RankFailed):
                        self._fail(rank, message.reason)
            if self._is_stopped(rank):
                reason = f"it has sent no heartbeat for {self._timeout:g} seconds: its process was stopped"
            else:
                reason = f"it has sent no heartbeat for {self._patience():g} seconds"
        except PeerGoneError as e:
            reason = self._ending(rank) or str(e)
        if not self._leaving:
            self._fail(rank, reason)
        link.close()

    def _patience(self) -> float:
        return max(self._timeout, LOADING_S * self.loading)

    def _is_stopped(self, rank: int) -> bool:
        """False if it was not started here."""
        return bool(self._processes) and is_stopped(self._processes[rank - 1])

    def _ending(self, rank: int) -> str | None:
        """Returns None if it was not started here."""
        if not self._processes:
            return None
        try:
            status = self._processes[rank - 1].wait(NAMING_S)
        except subprocess.TimeoutExpired:
            return None
        if status == ENDED_WITH_ANOTHER:  # that rank's own thread names it soon
            self._named.wait(NAMING_S)
        return f"its process {ending_of(status)}"

    def _lost_rank(self, e: BaseException) -> RankError | None:
        """The error to raise instead of `e`, if a lost rank caused it."""
        if isinstance(e, RankError):
            self._named.wait(NAMING_S)
            return self._error
        return self._error if isinstance(e, Exception) and not isinstance(e, HybridrtError) else None

    def _fail(self, rank: int, reason: str) -> None:
        """Ends the other ranks, and kernels here that wait for them."""
        with self._lock:
            if self._error is not None:
                return
            self._error = RankError(_LOST.format(rank, reason))
        self._named.set()
        self._end_processes(0.0)
        if self._comm is not None:
            self._comm.abort()
            if not self._processes:
                self._comm.disown()  # this rank may never leave a collective

    def _end_processes(self, grace_s: float) -> None:
        for process in self._processes:
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
