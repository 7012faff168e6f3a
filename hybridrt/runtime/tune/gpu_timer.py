"""Times launches on a GPU: many in one graph, between two events."""

from collections.abc import Callable, Sequence

import torch

from hybridrt.base.device import GraphCapture, seconds_of, synchronize
from hybridrt.kernels.core.launch import reserve_counters
from hybridrt.runtime.tune.trial import Call

LAUNCHES = 32  # in a graph: its own start is shared among them
LONG_S = 2e-3  # one call of so long is timed alone


class GPUTimer:
    """A `measure.Timer`. Graphs leave the host out, whose launches take longer than many kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        """Captures the calls in turn. The function that is returned owns the graph and its memory."""
        for call in calls:
            call()
        synchronize(self._device)
        once = seconds_of(self._device, lambda: [call() for call in calls])
        rounds = 1 if once > LONG_S else max(1, LAUNCHES // len(calls))
        reserve_counters(self._device)

        def run() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        replay = GraphCapture().record(run, "thread_local")
        replay()
        return lambda: seconds_of(self._device, replay) / (rounds * len(calls))
