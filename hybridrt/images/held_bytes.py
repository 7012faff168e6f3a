"""Counts the bytes of arrays for as long as anybody keeps them."""

from queue import Empty, SimpleQueue
from threading import Lock
from weakref import finalize

import numpy as np


class HeldBytes:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._total = Lock(), 0
        # A finalizer may run anywhere, also while this thread has the lock: it takes none.
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
