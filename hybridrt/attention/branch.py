"""Runs two independent parts of a step in parallel in a CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hybridrt.base.device import SideStream, is_capturing

_IN_LINE = nullcontext()


class Branch:
    """A second stream for one of two independent parts of a step.

    Kernels of a small batch leave most of the device idle, so two parallel chains take only as long
    as the longer one. Only captured steps are split: there the allocator keeps the memory that
    streams share, and the host costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._side, self._on_gpu = SideStream(device), device.type == "cuda"

    def side_stream(self) -> AbstractContextManager[object]:
        """Kernels launched in this context run in parallel with later ones, until `join`."""
        return self._side.after_current() if self._on_gpu and is_capturing() else _IN_LINE

    def join(self) -> None:
        """Later kernels wait for both streams."""
        if self._on_gpu and is_capturing():
            self._side.join()

    def segments(
        self,
        split: int,
        out: torch.Tensor | None,
        decode: Callable[[torch.Tensor | None], torch.Tensor],
        extend: Callable[[torch.Tensor | None], torch.Tensor],
    ) -> torch.Tensor:
        """[T, ...]: the first `split` tokens by `decode`, in parallel with the others by `extend`.
        Each gets its part of `out` [T, ...] and may write its result there."""
        first, second = (None, None) if out is None else (out[:split], out[split:])
        with self.side_stream():
            decoded = decode(first)
        chunks = extend(second)
        self.join()
        if out is None or decoded.data_ptr() != out.data_ptr() or chunks.data_ptr() != out[split:].data_ptr():
            return torch.cat((decoded, chunks))
        return out
