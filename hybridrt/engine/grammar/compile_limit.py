"""Limits how many grammars compile at a time, and the share of a core that costly ones get."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrt.base.errors import QueueFullError

REST = 3  # so costly grammars use at most a fourth of a core
MAX_REST = 2.0  # seconds
FULL = "too many grammars are being compiled: try again later"


class CompileLimit:
    """Lets `places` grammars compile at a time.

    Args:
        places: how many.
        rest: after a compilation, the next one begins this many times its duration later.
    """

    def __init__(self, places: int, rest: int = 0) -> None:
        self._places, self._rest = threading.Semaphore(places), rest
        self._begin = 0.0  # no compilation begins before this time

    @contextmanager
    def enter(self, seconds: float) -> Iterator[None]:
        """Holds a place while one grammar compiles. QueueFullError if waiting takes longer than `seconds`."""
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
