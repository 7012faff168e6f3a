"""Makes large work in a thread rest, so that other threads get Python's lock.

The engine releases the lock in every operation of a step, and would wait a switch interval each
time.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

WORK_SECONDS = 0.002  # CPU time after which a thread rests
REST = 4  # times as long as it has worked
T = TypeVar("T")


class _Pace(threading.local):
    """`since`: CPU time at the end of the last rest; None: not paced."""

    since: float | None = None


_pace = _Pace()


def paced(work: Callable[[], T]) -> T:
    """Does work that rests wherever it calls `rest`, and at its end."""
    _pace.since = time.thread_time()
    try:
        return work()
    finally:
        rest()
        _pace.since = None


def rest() -> None:
    """Called between two pieces of large work. Does nothing in threads that are not paced."""
    if _pace.since is None:
        return
    worked = time.thread_time() - _pace.since
    if worked >= WORK_SECONDS:
        time.sleep(REST * worked)
        _pace.since = time.thread_time()


def with_rests(things: Iterable[T]) -> Iterator[T]:
    """Yields `things`; calls `rest` before each."""
    for thing in things:
        rest()
        yield thing
