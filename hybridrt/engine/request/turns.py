"""The right to change an engine: one thread at a time, without interrupts, with recovery."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock, get_ident
from types import TracebackType
from weakref import WeakMethod

from hybridrt.base.ambient import undisturbed
from hybridrt.base.errors import EngineError, UnavailableError
from hybridrt.base.interrupts import Interrupts

_HELD = nullcontext()  # the turn of the thread that has it


class Turns:
    """One thread at a time. `with turns` waits, first come, first served; `with turns.now` does not
    wait. The owner may enter again. Ctrl-C waits for the end of a turn (`Interrupts`), and the
    thread's torch settings do not apply in it (`undisturbed`).

    Args:
        begin: called at the head of every turn.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._mutex = RLock()  # reentrant: finalizers may run in here
        self._line: deque[tuple[Lock, int]] = deque()
        self._owner: int | None = None
        self._process = os.getpid()
        self._entered: list[AbstractContextManager[None]] = []  # turns that the owner has entered with `with turns`

    def __enter__(self) -> None:
        turn = _HELD if self._owner == get_ident() else self._turn(wait=True)
        turn.__enter__()
        self._entered.append(turn)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._entered.pop().__exit__(kind, error, tb)

    @property
    def in_own_process(self) -> bool:
        """False in a process that was forked from the one that made this."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raises UnavailableError in a forked process: it lacks torch's threads, which a step waits
        for, and the owner of the turn.
        """
        if os.getpid() != self._process:
            raise UnavailableError(
                f"this engine belongs to process {self._process}, from which this one was forked, and its threads do "
                'not survive a fork: build a new LLM here, or start processes with the method "spawn"'
            )

    @property
    def now(self) -> AbstractContextManager[None]:
        """A turn that begins at once: EngineError if it is another thread's."""
        return _HELD if self._owner == get_ident() else self._turn(wait=False)

    @contextmanager
    def _turn(self, wait: bool) -> Iterator[None]:
        with Interrupts():
            self._take(wait)
            try:
                with undisturbed():
                    self._begin()
                    yield
            finally:
                self._hand_on()

    def _take(self, wait: bool) -> None:
        """Waits for it, or raises EngineError if it is taken and `wait` is False, or in a fork."""
        self.check_process()
        with self._mutex:
            if self._owner is None:
                self._owner = get_ident()
                return
            if not wait:
                raise EngineError(
                    f"thread {self._owner} is inside the engine, which takes one thread at a time: call it from one "
                    "thread, or within `with engine.turns:`, which waits as LLM.generate and LLM.stream do"
                )
            gate = Lock()
            gate.acquire()
            self._line.append((gate, get_ident()))
        try:
            gate.acquire()
        except BaseException:
            self._give_up(gate)
            raise

    def _give_up(self, gate: Lock) -> None:
        with self._mutex:
            if (gate, get_ident()) in self._line:
                self._line.remove((gate, get_ident()))
            else:
                self._hand_on()

    def _hand_on(self) -> None:
        with self._mutex:
            if self._line:
                gate, self._owner = self._line.popleft()
                gate.release()
            else:
                self._owner = None


class Change:
    """Wraps a change of bookkeeping. After an exception in the block, `begin` or the next change
    calls `recover`.

    Raises:
        EngineError: on entry, if the caller is within a change of its own: a finalizer, or a
            signal's handler.
    """

    def __init__(self, recover: Callable[[], None]) -> None:
        self._recover = recover
        self._inside = self._broken = False

    def __enter__(self) -> None:
        if self._inside:
            raise EngineError("the engine was called from within its own step; call it between two steps")
        if self._broken:
            self._recover()
        self._inside = self._broken = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._inside, self._broken = False, kind is not None

    def begin(self) -> None:
        """Recovers from a broken change, if there was one. Call it at the head of a turn."""
        self._inside = False
        if self._broken:
            with self:
                pass


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A bound method that does not keep its object alive: an object that its own part refers to is
    freed, with its memory, only by the garbage collector.
    """
    found = WeakMethod(method)

    def call() -> None:
        if (alive := found()) is not None:
            alive()

    return call
