"""The right to change an engine: one thread at a time, with recovery, undisturbed by its caller.

In a turn Ctrl-C waits, and the caller's torch settings do not apply: autocast, default device, grad
mode. The default dtype has no guard, because it belongs to the whole process. Instead every tensor
of hybridrt is made with an explicit dtype.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import Lock, RLock, get_ident
from types import TracebackType
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

import torch

from hybridrt.base.device import gpu_started
from hybridrt.base.errors import EngineError, UnavailableError
from hybridrt.base.interrupts import Interrupts

P = ParamSpec("P")
R = TypeVar("R")
_DEVICE_TYPES = ("cpu", "cuda")
_NOTHING = nullcontext()  # to be entered where there is nothing to change


class _Nondeterministic:
    """Switches deterministic algorithms off while at least one thread is inside. The switch belongs
    to the process. On a GPU it makes libraries raise.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._found: bool | None = None  # None: nothing to put back

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if torch.are_deterministic_algorithms_enabled():
                self._found = torch.is_deterministic_algorithms_warn_only_enabled()
                torch.use_deterministic_algorithms(False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._found is not None:
                torch.use_deterministic_algorithms(True, warn_only=self._found)
                self._found = None


_NONDETERMINISTIC = _Nondeterministic()


def undisturbed() -> AbstractContextManager[None]:
    """A context in which this thread has torch's default state. The caller's state is restored
    afterwards."""
    # Faster than `torch.get_default_device`.
    usual = (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch._C._is_any_autocast_enabled()
        and not (torch.are_deterministic_algorithms_enabled() and gpu_started())
        and not torch._C._len_torch_function_stack()
    )
    return _NOTHING if usual else _as_usual()


@contextmanager
def _as_usual() -> Iterator[None]:
    with ExitStack() as stack:
        # First, because it sets grad mode. Tensors made here are used outside of it.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in _DEVICE_TYPES:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.device("cpu"))
        if gpu_started():
            stack.enter_context(_NONDETERMINISTIC)
        yield


def in_undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called within `undisturbed`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with undisturbed():
            return function(*args, **kwargs)

    return call


class Turns:
    """One thread at a time. `with turns` waits, first come, first served; `with turns.now` does not
    wait. The owner may enter again. Ctrl-C waits for the end of a turn (`Interrupts`), and the
    thread's torch settings do not apply in it (`undisturbed`).

    Args:
        change: a turn recovers first if the one before broke a change off.
    """

    def __init__(self, change: "Change") -> None:
        self._change, self._at_once = change, _AtOnce(self)
        self._mutex = RLock()  # reentrant: finalizers may run in here
        self._line: deque[tuple[Lock, int]] = deque()
        self._owner: int | None = None
        self._process = os.getpid()
        self._depth = 0  # how often the owner has entered again with `with turns`
        # The contexts of the owner's turn.
        self._interrupts = Interrupts()
        self._settings: AbstractContextManager[None] = _NOTHING

    def __enter__(self) -> None:
        if self._owner == get_ident():
            self._depth += 1
        else:
            self.begin_turn(wait=True)

    def begin_turn(self, wait: bool) -> None:
        """Begins a turn of this thread, which `__exit__` ends. EngineError if it is another thread's
        and `wait` is False."""
        interrupts = Interrupts()
        interrupts.__enter__()
        try:
            self._take(wait)
        except BaseException as e:
            interrupts.__exit__(type(e), e, e.__traceback__)
            raise
        self._interrupts, self._settings = interrupts, _NOTHING
        try:
            settings = undisturbed()
            settings.__enter__()
            self._settings = settings
            if self._change.broken:
                self._change.recover()
        except BaseException as e:
            self.__exit__(type(e), e, e.__traceback__)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._depth:
            self._depth -= 1
            return
        interrupts = self._interrupts
        try:
            self._settings.__exit__(kind, error, tb)
        finally:
            self._hand_on()
            interrupts.__exit__(kind, error, tb)

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
        return _NOTHING if self._owner == get_ident() else self._at_once

    def _take(self, wait: bool) -> None:
        """Takes the turn. EngineError in a fork, or if another thread has the turn and `wait` is False."""
        if os.getpid() != self._process:
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


class _AtOnce:
    """A turn that does not wait."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.begin_turn(wait=False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._turns.__exit__(kind, error, tb)


class Change:
    """Wraps a change of bookkeeping. After an exception in the block, `recover` or the next change
    calls `recovery`.

    Attributes:
        broken: within a change, and after one that an exception has left.

    Raises:
        EngineError: on entry, if the caller is within a change of its own: a finalizer, or a
            signal's handler.
    """

    def __init__(self, recovery: Callable[[], None]) -> None:
        self._recovery = recovery
        self._inside = self.broken = False

    def __enter__(self) -> None:
        if self._inside:
            raise EngineError("the engine was called from within its own step; call it between two steps")
        if self.broken:
            self._recovery()
        self._inside = self.broken = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._inside, self.broken = False, kind is not None

    def recover(self) -> None:
        """Recovers from a broken change, if there was one. Call it at the head of a turn."""
        self._inside = False
        if self.broken:
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
