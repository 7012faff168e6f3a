"""A replica's stream of events, cut where the number of its tokens is known."""

import re
from array import array
from collections.abc import Sequence

from hybridrt.base.errors import MessageError
from hybridrt.fleet.answer_form import ANY, AnswerForm
from hybridrt.server.core.respond import ELSEWHERE

MAX_HELD_BYTES = 2**20
MAX_EVENT_BYTES = 2**29  # the last one of /v1/responses may repeat all log-probabilities; they are not held
MAX_IDS = 2**18  # of an answer that can be resumed
_COUNT = re.compile(rb": tokens (\d{1,18})((?: \d{1,10})*)\n\n")


class CountedStream:
    """Takes the comments out that say which tokens have come. Gives out what comes before such a
    comment, and at most MAX_HELD_BYTES without one: what a client has got belongs to known tokens.

    Args:
        ids: first tokens of the answer, which the client had before.
        form: of its events.

    Attributes:
        tokens: that the client has got, up to the last call of `given`.
        counted: there was a comment.
        goes_elsewhere: the replica has said that it cannot go on. What follows is not given out.
    """

    def __init__(self, ids: Sequence[int] = (), form: AnswerForm = ANY) -> None:
        self.tokens, self.counted, self.goes_elsewhere = len(ids), False, False
        self._ids: array[int] | None = array("q", ids)
        self._held, self._new = bytearray(), list[re.Match[bytes]]()
        self._begin = self._searched = 0  # of the event that has not ended; no end of it is before
        self._form, self._last = form, b""
        self._head, self._gone = b"", 0  # of this event: what was given out before its end

    @property
    def ids(self) -> list[int] | None:
        """The tokens; None if they are not known, as with several samples."""
        return None if self._ids is None or len(self._ids) != self.tokens else self._ids.tolist()

    def feed(self, chunk: bytes) -> bytes:
        """What can be given out. Each byte is looked at once, however few come at a time.

        Raises:
            MessageError: an event is none.
        """
        held, found = self._held, bytearray()
        held += chunk
        while (end := held.find(b"\n\n", self._searched) + 2) > 1:
            start, self._begin, self._searched = self._begin, end, end
            event = bytes(held[start:end])
            if event == ELSEWHERE:
                self.goes_elsewhere = True
                break
            count = _COUNT.fullmatch(event) if event.startswith(b": tokens") else None
            if count is None:
                self._check(event)
            else:
                self.counted = True
                self._new.append(count)
                found += held[:start]
                self._drop(end)
        self._searched = max(self._begin, len(held) - 1)
        if len(held) > MAX_HELD_BYTES:
            self._check_unfinished()
            self._ids = None  # the client gets what no count has told
            found += held[: self._searched]
            self._drop(self._searched)
        return bytes(found)

    def given(self) -> None:
        """The client has got all that `feed` has returned."""
        for count in self._new:
            self.tokens = int(count[1])
            if self._ids is not None:
                self._ids.extend(map(int, count[2].split()))
                self._ids = self._ids if len(self._ids) <= MAX_IDS else None
        self._new.clear()

    def rest(self) -> bytes:
        """What is left at the end of the stream. MessageError if this is no end."""
        self._form.check_end(self._last)
        return bytes(self._held)

    def _check(self, event: bytes) -> None:
        if not self._gone:
            self._form.check_event(event)
        if not (head := self._head or event[:64]).startswith(b":"):
            self._last = head
        self._head, self._gone = b"", 0

    def _check_unfinished(self) -> None:
        """Its first bytes must be those of an event, and it may not be endless."""
        self._head += bytes(self._held[self._begin : self._searched])[: 64 - len(self._head)]
        self._form.check_beginning(self._head)
        self._gone += self._searched - self._begin
        if self._gone > MAX_EVENT_BYTES:
            raise MessageError(f"an event has more than {MAX_EVENT_BYTES} bytes")

    def _drop(self, end: int) -> None:
        del self._held[:end]
        self._begin = self._searched = 0
