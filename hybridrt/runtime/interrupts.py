"""Ctrl-C between steps: while host bookkeeping changes, an interrupt waits."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """While this context lasts, SIGINT is noted; `check` and the end of the context raise KeyboardInterrupt for it.

    It acts in the main thread alone, because signals go nowhere else, and only in place of Python's own handler: a
    handler that the application has installed stays as it is. Contexts may nest: the outermost one acts.
    """

    __slots__ = ("_acts", "_waiting")

    def __init__(self) -> None:
        self._acts = self._waiting = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is not threading.main_thread():
            return self
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._acts = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._acts and signal.getsignal(signal.SIGINT) == self._note:  # else it has been changed meanwhile
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._acts = False
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if SIGINT has come."""
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting = True
