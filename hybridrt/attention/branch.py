"""Two parts of a step that don't need each other, side by side in a CUDA graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hybridrt.base.device import SideStream, is_capturing

_IN_LINE = nullcontext()


class Branch:
    """A second stream for one of two independent parts of a step.

    Kernels of a small batch leave most of the device idle, so two chains of them take as long as the longer one. Only
    captured steps are split: within a graph the allocator keeps what the streams share, and there is no host to slow.
    """

    def __init__(self, device: torch.device) -> None:
        self._side, self._on_gpu = SideStream(device), device.type == "cuda"

    def beside(self) -> AbstractContextManager[object]:
        """What is launched within runs beside what is launched after it, until `join`."""
        return self._side.after_current() if self._on_gpu and is_capturing() else _IN_LINE

    def join(self) -> None:
        """What is launched from here on needs both."""
        if self._on_gpu and is_capturing():
            self._side.join()

    def segments(
        self,
        split: int,
        out: torch.Tensor | None,
        decode: Callable[[torch.Tensor | None], torch.Tensor],
        extend: Callable[[torch.Tensor | None], torch.Tensor],
    ) -> torch.Tensor:
        """[T, ...] of a mixed step's layer: its first `split` tokens by `decode` beside the others by `extend`. Each is
        given its part of `out` [T, ...], where it may leave its result; None if that is None."""
        first, second = (None, None) if out is None else (out[:split], out[split:])
        with self.beside():
            decoded = decode(first)
        chunks = extend(second)
        self.join()
        if out is None or decoded.data_ptr() != out.data_ptr() or chunks.data_ptr() != out[split:].data_ptr():
            return torch.cat((decoded, chunks))
        return out
