"""Turns of grammars at being compiled. Costly ones have a share of one core, however many come."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrt.base.errors import QueueFullError

REST = 3  # so costly grammars take at most a fourth of a core
MAX_REST = 2.0  # seconds
FULL = "too many grammars are being compiled: try again later"


class Turns:
    """Lets so many grammars be compiled at a time.

    Args:
        places: how many.
        rest: once a turn ends, the next one begins this many times as long after it.
    """

    def __init__(self, places: int, rest: int = 0) -> None:
        self._places, self._rest = threading.Semaphore(places), rest
        self._begin = 0.0  # not before

    @contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Within it, a grammar has its turn. Raises QueueFullError if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        if not self._places.acquire(timeout=seconds):
            raise QueueFullError(FULL)
        try:
            if self._begin > deadline:
                raise QueueFullError(FULL)
            if (ahead := self._begin - time.monotonic()) > 0:
                time.sleep(ahead)
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._begin = now + min(self._rest * (now - began), MAX_REST)
        finally:
            self._places.release()
