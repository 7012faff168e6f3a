"""Keeps requests away from a server that answers wrongly, for longer each time."""

import time

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # seconds, after wrong answers one after the other
TRIAL = 5.0  # seconds for which a trial keeps others away: its answer may take minutes


class Circuit:
    """After a wrong answer a server gets nothing for a pause. Then one request tries it: until its answer
    has begun well, and for TRIAL seconds at most, it gets no other. An answer that began after the pause and is
    right to its end makes the next pause short again.

    Attributes:
        why: what was wrong with the last answer. None: it was right.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self._wrong, self._until = 0, 0.0
        self._alone_until = 0.0  # of a trial

    @property
    def is_aside(self) -> bool:
        return self.why is not None and time.monotonic() < self._until

    @property
    def takes_requests(self) -> bool:
        return not self.is_aside and time.monotonic() >= self._alone_until

    def begin(self) -> bool:
        """A request begins. Whether it tries the server: then call `tried`, `right` or `wrong`."""
        if self.why is None:
            return False
        self._alone_until = time.monotonic() + TRIAL
        return True

    def tried(self) -> None:
        """What came of the answer is right, or the request has ended without one."""
        self._alone_until = 0.0

    def right(self, began: float) -> bool:
        """An answer is right to its end. `began`: by `time.monotonic`. Returns whether this ends what a wrong answer
        has begun. What began before the end of the pause does not."""
        if began < self._until:
            return False
        was_wrong = self.why is not None
        self._wrong, self.why, self._alone_until = 0, None, 0.0
        return was_wrong

    def wrong(self, why: str) -> float | None:
        """Returns the seconds of the pause that begins. None: there is one already."""
        self._alone_until = 0.0
        if self.is_aside:
            return None
        pause = PAUSES[min(self._wrong, len(PAUSES) - 1)]
        self._wrong, self.why, self._until = self._wrong + 1, why, time.monotonic() + pause
        return pause
