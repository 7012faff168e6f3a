"""Rests of a thread that works on something large, so that it has a share of Python's lock alone.

Work in Python takes the lock again as soon as another thread has let it go. An engine lets it go with every operation
of a step, and would wait a switch interval each time. So large work stops now and then.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

WORK_SECONDS = 0.002  # of CPU time, after which a thread rests
REST = 4  # times as long as it has worked
T = TypeVar("T")


class _Pace(threading.local):
    """`since`: the thread's CPU time at the end of its last rest; None: its work is not paced."""

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
    """Large work calls this between two pieces of it. Nothing happens in threads whose work is not paced."""
    if _pace.since is None:
        return
    worked = time.thread_time() - _pace.since
    if worked >= WORK_SECONDS:
        time.sleep(REST * worked)
        _pace.since = time.thread_time()


def with_rests(things: Iterable[T]) -> Iterator[T]:
    """The same things, with a chance to rest before each."""
    for thing in things:
        rest()
        yield thing
