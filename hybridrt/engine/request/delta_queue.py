"""Queues of deltas from an engine to its readers."""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeVar

from hybridrt.engine.request.outputs import Delta


class DeltaSource(Protocol):
    """A sample with deltas for a reader. `queue`: the reader's, None without one."""

    queue: "weakref.ref[DeltaQueue] | None"

    def delta(self) -> Delta:
        """What it has gained since the last call."""


S = TypeVar("S", bound=DeltaSource)


class DeltaQueue:
    """Samples with news for one reader. A delta is built when it is read: a slow reader gets the
    gains of several steps in one, and waiting costs nothing.

    Use it within the engine's turns (`with engine.turns:`) if several threads share the engine.

    Args:
        arrays: keep log-probabilities of prompts as arrays (`Delta.prompt_scores`): the reader does
            the slow conversion to dictionaries.
    """

    def __init__(self, *, arrays: bool = False) -> None:
        self._arrays = arrays
        self._moved: dict[DeltaSource, None] = {}  # in the order of their first gain

    def __bool__(self) -> bool:
        return bool(self._moved)

    def put(self, request: DeltaSource) -> None:
        self._moved[request] = None

    def take_deltas(self) -> list[Delta]:
        """One delta for each sample that has gained something since the last call, or has ended."""
        moved, self._moved = self._moved, {}
        deltas = list[Delta]()
        for sample in moved:
            deltas.append(delta := sample.delta())
            if not self._arrays:
                delta.spell_out()
        return deltas


class Abandonment:
    """Notes queues that were abandoned or collected: their requests are to end.

    Attributes:
        notes: empty while there are none.
    """

    def __init__(self) -> None:
        self.notes: deque[weakref.ref[DeltaQueue]] = deque()

    def watch(self, queue: DeltaQueue) -> "weakref.ref[DeltaQueue]":
        """The reference that a request keeps. When the queue goes, in any thread, C code alone
        leaves the note: no interrupt can come between.
        """
        return weakref.ref(queue, self.notes.append)

    def note(self, queue: DeltaQueue) -> None:
        """Any thread may call this at any time."""
        self.notes.append(weakref.ref(queue))

    def take_abandoned(self, requests: Iterable[S]) -> list[S]:
        gone = [None, *(self.notes.popleft()() for _ in range(len(self.notes)))]
        return [r for r in requests if r.queue is not None and r.queue() in gone]
