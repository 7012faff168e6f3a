"""Counts the bytes of arrays until they are garbage."""

from collections import Counter
from queue import Empty, SimpleQueue
from threading import Lock
from weakref import finalize

import numpy as np


class HeldBytes:
    """Of each client. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._held = Lock(), Counter[str]()
        # A finalizer takes no lock: this thread may have it.
        self._released: SimpleQueue[tuple[str, int]] = SimpleQueue()

    def add(self, array: np.ndarray, client: str = "") -> None:
        finalize(array, self._released.put, (client, array.nbytes)).atexit = False
        with self._lock:
            self._held[client] += array.nbytes

    def by_client(self) -> dict[str, int]:
        """Bytes of those that have any."""
        with self._lock:
            try:
                while True:
                    client, size = self._released.get_nowait()
                    self._held[client] -= size
                    if not self._held[client]:
                        del self._held[client]
            except Empty:
                return dict(self._held)
