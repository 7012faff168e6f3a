"""Threads that clients share (hybridrt/base/fair_threads.py)."""

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Event
from typing import Any

import pytest

from hybridrt.base import fair_threads
from hybridrt.base.fair_threads import FairThreads

WAIT = 60.0


class Clock:
    """Time that passes while work runs."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(fair_threads, "time", made)
    return made


@pytest.fixture
def release() -> Iterator[Event]:
    """Ends all work that waits for it, at the end of the test at the latest."""
    event = Event()
    yield event
    event.set()


class Single:
    """One thread, which notes whose work it does. Each takes a second."""

    def __init__(self, clock: Clock, release: Event, weights: dict[str, float] | None = None) -> None:
        self.done, self._clock, self._release = list[str](), clock, release
        self.threads = FairThreads(1, 1, "test", weights)
        self._results = [self.threads.submit("first", self._wait)]  # all others come before it has ended

    def submit(self, clients: str) -> None:
        self._results += [self.threads.submit(client, partial(self._note, client)) for client in clients]

    def order(self) -> str:
        self._release.set()
        for result in self._results:
            result.result(WAIT)
        self.threads.close()
        return "".join(self.done)

    def _wait(self) -> None:
        assert self._release.wait(WAIT)

    def _note(self, client: str) -> None:
        self.done.append(client)
        self._clock.now += 1.0


def test_a_client_has_only_some_of_the_threads(release: Event) -> None:
    threads = FairThreads(3, 2, "test")
    begun = [Event() for _ in range(5)]

    def hold(started: Event) -> None:
        started.set()
        assert release.wait(WAIT)

    held = [threads.submit("a", partial(hold, each)) for each in begun]
    assert all(each.wait(WAIT) for each in begun[:2])
    assert threads.submit("b", lambda: 7).result(WAIT) == 7
    assert not any(each.is_set() for each in begun[2:])
    release.set()
    for each in held:  # those that waited, too
        each.result(WAIT)
    threads.close()


def test_the_client_that_has_had_least_goes_first(clock: Clock, release: Event) -> None:
    single = Single(clock, release)
    single.submit("aaaaab")
    assert single.order() == "abaaaa"


def test_weights_are_shares(clock: Clock, release: Event) -> None:
    single = Single(clock, release, {"a": 2.0})
    single.submit("aaaaaabbb")
    assert single.order() == "abaabaabaab"[:9]


def test_who_had_nothing_to_do_gets_no_credit(clock: Clock, release: Event) -> None:
    single = Single(clock, release)

    def late() -> None:
        single.submit("bbbb")

    single.submit("aaaa")
    single._results.append(single.threads.submit("a", late))
    single.submit("aaaa")
    assert single.order() == "aaaa" + "ab" * 4


def test_cancelled_work_is_not_done(clock: Clock, release: Event) -> None:
    single = Single(clock, release)
    cancelled = single.threads.submit("a", partial(single.done.append, "never"))
    assert cancelled.cancel()
    single.submit("b")
    assert single.order() == "b"


def test_an_error_is_the_result(release: Event) -> None:
    threads = FairThreads(1, 1, "test")

    def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        threads.submit("a", fail).result(WAIT)
    assert threads.submit("a", lambda: 7).result(WAIT) == 7
    threads.close()


@pytest.mark.parametrize("cancel", [False, True])
def test_close_refuses_further_work(clock: Clock, release: Event, cancel: bool) -> None:
    single = Single(clock, release)
    waiting: Future[Any] = single.threads.submit("a", lambda: 7)
    single.threads.close(cancel)
    with pytest.raises(RuntimeError):
        single.submit("b")
    release.set()
    if cancel:
        with pytest.raises(CancelledError):
            waiting.result(WAIT)
    else:
        assert waiting.result(WAIT) == 7


def test_names_of_clients_do_not_add_up() -> None:
    threads = FairThreads(1, 1, "test")
    for i in range(10):
        threads.submit(str(i), lambda: None).result(WAIT)
    threads.submit("last", lambda: None).result(WAIT)
    threads.close()
    threads._pool.shutdown(wait=True)
    assert not threads._clients
