"""Limits on a step's time for grammars, in CPU time of the thread: a busy machine fails nobody."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrt.base.errors import GrammarError

SECONDS_A_TOKEN = 0.003  # average of a request
BURST_SECONDS = 0.1  # above the average
HEAVY_SECONDS = 0.005  # one mask of a heavy request
STEP_SECONDS = 0.1  # all heavy requests of a step together
WATCH_SECONDS = 0.01  # masks are measured from here on
WATCHED_STEPS = 16  # after its last heavy mask


class Allowance:
    """Remaining time of one request. It grows with each token.

    Attributes:
        last: seconds of its last measured mask.
        watched: steps for which its masks are measured.
    """

    def __init__(self) -> None:
        self._left, self.last, self.watched = BURST_SECONDS, 0.0, 0
        self._failure = ""

    @property
    def heavy(self) -> bool:
        return self.last > HEAVY_SECONDS

    def watch(self) -> None:
        self.watched = WATCHED_STEPS

    def advanced(self, seconds: float) -> None:
        self._left = min(self._left + SECONDS_A_TOKEN, BURST_SECONDS)
        self.spend(seconds)

    def masked(self, seconds: float, masks: int) -> None:
        self.last = seconds / masks
        self.watched = WATCHED_STEPS if self.heavy else self.watched - 1
        self._left = min(self._left + SECONDS_A_TOKEN * (masks - 1), BURST_SECONDS)
        self.spend(seconds)

    def spend(self, seconds: float) -> None:
        self._left -= seconds
        if self._left < 0:
            self.fail(f"more than {1000 * SECONDS_A_TOKEN:g} ms of CPU time a token")

    def fail(self, reason: str) -> None:
        self._failure = self._failure or reason

    def check_time(self) -> None:
        if self._failure:
            raise GrammarError(
                f"structured_outputs delay all other requests: its masks take {self._failure}; make it simpler"
            )


@contextmanager
def thread_seconds() -> Iterator[list[float]]:
    """A list that holds, after the block, its CPU seconds in this thread."""
    taken, began = [0.0], time.thread_time()
    try:
        yield taken
    finally:
        taken[0] = time.thread_time() - began
