"""Asynchronous iterator over deltas, which joins those that its reader has not read."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

from hybridrt.engine.api.engine_loop import EngineLoop
from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.engine.request.outputs import Delta


class DeltaStream(AsyncIterator[Delta]):
    """The deltas of one or several requests. Unread deltas of a sample are joined into one, so a
    slow reader needs memory only for its output and delays no other reader. `close`, or dropping
    the last reference, aborts the samples that have not ended.

    Attributes:
        requests: each request's prompt tokens and parameters by its id, in order.
        running: samples that have not ended; 0 once the stream is closed.
        arrival: when its requests were submitted, in seconds of `time.monotonic()`.
        write_now: called with a delta that comes while the reader waits. If it returns True, the delta
            is done and the reader waits until all samples have ended, so its task need not run for
            every token. A failure always goes to the reader. None: all deltas do.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.requests: dict[str, PreparedPrompt] = {}
        self.running = 0
        self.arrival = time.monotonic()
        self.write_now: Callable[[Delta], bool] | None = None
        self._loop, self._process = loop, os.getpid()
        self._gains: dict[tuple[str, int], Delta] = {}  # deltas by sample
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Gives a delta to `write_now`, or adds it and wakes the reader. Call this in the event loop."""
        if not self.running:
            return
        self.running -= delta.finish_reason is not None
        waiter = None if self._waiter is None or self._waiter.done() else self._waiter
        if waiter is not None and delta.error is None and self.write_now is not None:
            try:
                taken = self.write_now(delta)
            except Exception as e:  # other readers must get their deltas
                waiter.set_exception(e)
                return
            if taken:
                if not self.running:
                    waiter.set_result(None)
                return
        held = self._gains.setdefault((delta.request_id, delta.index), delta)
        if held is not delta:
            held.extend(delta)
        if waiter is not None:
            waiter.set_result(None)

    async def __anext__(self) -> Delta:
        """Raises EngineError if the sample failed, or in a forked process."""
        while not self._gains:
            if not self.running:
                raise StopAsyncIteration
            if os.getpid() != self._process:
                self._loop.check_process()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta = self._gains.pop(next(iter(self._gains)))
        if delta.error is not None:
            raise delta.error
        return delta

    def abort(self) -> None:
        for request_id in self.requests:
            self._loop.abort(request_id)

    def close(self) -> None:
        """Aborts the requests that have not ended. Drops their later deltas."""
        self.write_now = None  # it may refer to this stream
        if self.running:
            self.running = 0
            self.abort()

    def __del__(self) -> None:
        self.close()
