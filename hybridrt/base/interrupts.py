"""Ctrl-C, delayed to the end of a block."""

import signal
import threading
import weakref
from types import FrameType, TracebackType


class _Note:
    """Notes that SIGINT has come. If its context is garbage, the handler restores Python's own and
    calls it.
    """

    def __init__(self, context: "Interrupts") -> None:
        self.context = weakref.ref(context)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        context = self.context()
        if context is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.default_int_handler(number, frame)
        else:
            context.waiting = True


class Interrupts:
    """Delays SIGINT: the end of the context, or `raise_if_interrupted`, raises KeyboardInterrupt for it.

    It acts only in the main thread, where signals are handled, and only in place of Python's own
    handler: an application's handler stays. Contexts may nest; only the outermost acts, because
    installing and removing a handler takes 10 microseconds.
    """

    _outermost: "weakref.ref[Interrupts] | None" = None
    _note: _Note | None = None
    waiting = False

    def __enter__(self) -> "Interrupts":
        if Interrupts._outermost is not None and Interrupts._outermost() is not None:
            return self
        if threading.current_thread() is not threading.main_thread():
            return self
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.default_int_handler or (isinstance(handler, _Note) and handler.context() is None):
            self._note = _Note(self)
            signal.signal(signal.SIGINT, self._note)
            Interrupts._outermost = self._note.context
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._note is not None:
            Interrupts._outermost = None
            if signal.getsignal(signal.SIGINT) is self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.waiting:
            self.raise_if_interrupted()

    def raise_if_interrupted(self) -> None:
        """Raises KeyboardInterrupt if SIGINT has come."""
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt
