"""Where a token's time goes within a server: the time between tokens at each point of their way to the socket."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from hybridrt.bench.timing import percentile
from hybridrt.engine.api.async_llm import AsyncLLM, DeltaStream
from hybridrt.engine.api.engine_loop import StepMessage
from hybridrt.engine.request.outputs import Delta

POINTS = ("read", "delivered", "handed_out", "written")


class Stamps:
    """Notes when each token is at each point, in seconds of `time.perf_counter()`.

    - read: the engine's thread has the step's tokens from the device.
    - delivered: it has made the step's deltas, and gives them to the event loop.
    - handed_out: the event loop begins to hand them out.
    - written: it has given this stream's bytes to the socket.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._read = 0.0
        self._steps: deque[tuple[float, float]] = deque()  # of messages on their way: read, delivered
        self._now = (0.0, 0.0, 0.0)  # of the message that is handed out
        self._tokens: dict[str, list[tuple[float, ...]]] = {}  # by request, at all points
        self._bursts: list[tuple[float, ...]] = []  # by step, at all points; the last one is of the last stream

    def clear(self) -> None:
        """Forgets what has been noted."""
        self._tokens.clear()
        self._bursts.clear()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While this lasts, stamps are noted."""
        executor: Any = self._llm.llm.engine.executor
        loop: Any = self._llm._loop
        served: Any = self._llm
        launch, deliver, hand_out, put = executor.launch, loop._deliver, served._hand_out, DeltaStream.put

        def noting_launch(plan: Any) -> Any:
            handle = launch(plan)
            result = handle.result

            def read() -> Any:
                found = result()
                self._read = time.perf_counter()
                return found

            handle.result = read
            return handle

        def noting_deliver(message: StepMessage) -> None:
            self._steps.append((self._read, time.perf_counter()))
            deliver(message)

        def noting_hand_out(message: StepMessage) -> None:
            self._now = (*self._steps.popleft(), time.perf_counter())
            hand_out(message)
            self._bursts.append((*self._now, time.perf_counter()))

        def noting_put(stream: DeltaStream, delta: Delta) -> None:
            put(stream, delta)
            if delta.token_ids:
                self._tokens.setdefault(delta.request_id, []).append((*self._now, time.perf_counter()))

        executor.launch, loop._deliver, served._hand_out = noting_launch, noting_deliver, noting_hand_out
        DeltaStream.put = noting_put  # type: ignore[method-assign]
        try:
            yield
        finally:
            executor.launch, loop._deliver, served._hand_out = launch, deliver, hand_out
            DeltaStream.put = put  # type: ignore[method-assign]

    def figures(self) -> dict[str, float]:
        """Percentiles in milliseconds: between tokens at each point, from point to point of a step, and by how much a
        stream's way from the device to the socket differs from that of its token before."""
        found = {}
        streams = list(self._tokens.values())
        for i, point in enumerate(POINTS):
            found |= _spread(f"between_{point}", [b[i] - a[i] for each in streams for a, b in pairwise(each)])
        for i, point in enumerate(POINTS[1:]):
            found |= _spread(f"until_{point}", [step[i + 1] - step[i] for step in self._bursts])
        ways = [[stamp[-1] - stamp[0] for stamp in each] for each in streams]
        found |= _spread("way", [way for each in ways for way in each])
        return found | _spread("way_change", [abs(b - a) for each in ways for a, b in pairwise(each)])


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_p{p}_ms": 1e3 * percentile(seconds, p) for p in (50, 90, 99)}
