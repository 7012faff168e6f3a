"""Two parts of a block that don't need each other, side by side in a CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """A second stream for one of two independent parts of a step.

    Kernels of a small batch leave most of the device idle, so two chains of them take as long as the longer one. Only
    captured steps are split: within a graph the allocator keeps what the streams share, and there is no host to slow.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched within runs beside what is launched after it, until `join`."""
        stream = self._capturing()
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What is launched from here on needs both."""
        stream = self._capturing()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def _capturing(self) -> torch.cuda.Stream | None:
        return self._stream if self._stream is not None and torch.cuda.is_current_stream_capturing() else None
