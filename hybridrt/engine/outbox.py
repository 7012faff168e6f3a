"""Outputs on their way out of an engine: to the receiver of a request, or to whoever steps the engine."""

import weakref
from collections import deque
from collections.abc import Iterable

from hybridrt.engine.request import Receiver, Request, RequestOutput


class Outbox:
    """Keeps the outputs of requests without a receiver, and notes which receivers were abandoned or have gone.

    Attributes:
        outputs: what `take` will give.
        abandoned: receivers' references: a note for each that is gone or was abandoned.
    """

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.abandoned: deque[weakref.ref[Receiver]] = deque()

    def owner(self, receiver: Receiver | None) -> "weakref.ref[Receiver] | None":
        """The reference that a request keeps. When the receiver goes, in whatever thread, C code alone leaves the note:
        no interrupt can come between."""
        return None if receiver is None else weakref.ref(receiver, self.abandoned.append)

    def abandon(self, receiver: Receiver) -> None:
        """Leaves a note. Any thread may call this at any time."""
        self.abandoned.append(weakref.ref(receiver))

    def take_abandoned(self, requests: Iterable[Request]) -> list[Request]:
        """Those of the requests whose receiver was abandoned or has gone; the notes are read then."""
        gone = [None, *(self.abandoned.popleft()() for _ in range(len(self.abandoned)))]
        return [r for r in requests if r.receiver is not None and r.receiver() in gone]

    def put(self, request: Request) -> None:
        """Hands out the request's output so far."""
        if request.receiver is None:
            self.outputs.append(request.snapshot())
        elif (receiver := request.receiver()) is not None:
            receiver.put(request.snapshot())

    def take(self) -> list[RequestOutput]:
        """The outputs since the last `take`, but for those that went to receivers."""
        outputs, self.outputs = self.outputs, []
        return outputs
