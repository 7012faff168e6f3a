"""Threads that clients share: no client waits for all the work of another one."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

Work = Callable[[], Any]


@dataclass(frozen=True)
class _Task:
    """Work of a client, and where its result goes."""

    client: str
    work: Work
    result: "Future[Any]" = field(default_factory=Future)

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            found = self.work()
        except BaseException as e:
            self.result.set_exception(e)
            del self  # the error has this frame
        else:
            self.result.set_result(found)


@dataclass
class _Client:
    """
    Attributes:
        spent: seconds of threads, divided by its weight.
        waiting: work that no thread has taken.
        running: threads that do its work.
    """

    spent: float = 0.0
    waiting: deque[_Task] = field(default_factory=deque)
    running: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)


class FairThreads:
    """The client that has had the fewest seconds for its weight goes first, and its own work is first come, first
    served. One that had nothing to do gets no credit for that time, as with prompts (ClientQueues).

    Args:
        threads: started when there is work.
        of_client: those that one client may have at a time.
        weights: shares by client; others have 1.
    """

    def __init__(self, threads: int, of_client: int, name: str, weights: Mapping[str, float] | None = None) -> None:
        self._of_client, self._weights = of_client, weights or {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = RLock()  # reentrant: a finalizer may close it in here
        self._clients = dict[str, _Client]()
        self._now = 0.0  # `spent` of the client that was served last, before that

    def submit(self, client: str, work: Work) -> "Future[Any]":
        """The result of work. RuntimeError after `close`."""
        task = _Task(client, work)
        with self._lock:
            self._pool.submit(self._work_off)  # it waits for the lock
            known = self._clients.setdefault(client, _Client())
            if not known.has_work:
                known.spent = max(known.spent, self._now)
            known.waiting.append(task)
        return task.result

    def close(self, cancel: bool = False) -> None:
        """Refuses further work. Work that was submitted goes on; with `cancel`, only if it has begun."""
        with self._lock:
            for known in self._clients.values() if cancel else ():
                while known.waiting:
                    known.waiting.popleft().result.cancel()
        self._pool.shutdown(wait=False)

    def _work_off(self) -> None:
        """Work for one thread. It goes on while there is some: a client that had all its threads may have one again,
        and the call that came with its work has ended."""
        while (task := self._take()) is not None:
            began = time.monotonic()
            try:
                task.run()
            finally:
                self._charge(task.client, time.monotonic() - began)

    def _take(self) -> _Task | None:
        with self._lock:
            free = [name for name, each in self._clients.items() if each.waiting and each.running < self._of_client]
            if not free:
                return None
            client = min(free, key=lambda name: (self._clients[name].spent, self._clients[name].running))
            known = self._clients[client]
            known.running += 1
            self._now = known.spent
            return known.waiting.popleft()

    def _charge(self, client: str, seconds: float) -> None:
        with self._lock:
            known = self._clients[client]
            known.running -= 1
            known.spent += seconds / self._weights.get(client, 1.0)
            if not any(each.has_work for each in self._clients.values()):
                self._clients.clear()  # else names would add up
