"""Counts the bytes of arrays until they are garbage."""

from queue import Empty, SimpleQueue
from threading import Lock
from weakref import finalize

import numpy as np


class HeldBytes:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._total = Lock(), 0
        # A finalizer takes no lock: this thread may have it.
        self._released: SimpleQueue[int] = SimpleQueue()

    def add(self, array: np.ndarray) -> None:
        finalize(array, self._released.put, array.nbytes).atexit = False
        with self._lock:
            self._total += array.nbytes

    def total(self) -> int:
        with self._lock:
            try:
                while True:
                    self._total -= self._released.get_nowait()
            except Empty:
                return self._total
