"""The one place that asks torch about a GPU: facts, memory, events, streams and graphs. No other file names a chip.

On a CPU work is done when it is launched, so events and streams do nothing there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

from hybridrt.base.errors import ConfigError


@dataclass(frozen=True)
class GPUFacts:
    """What kernels and the memory plan depend on.

    Attributes:
        capability: such as (9, 0).
        shared_memory: bytes that a program may have at most.
        total_bytes, free_bytes: of its memory.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "GPUFacts":
        """Those of a device of this machine. Memory that torch keeps without using it is free."""
        found: Any = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        capability = (found.major, found.minor)
        shared = int(found.shared_memory_per_block_optin)
        return cls(found.name, capability, found.multi_processor_count, shared, total, free)


# Total and free bytes as the driver gives them on an idle GPU.
_SHARED = 227 << 10
KNOWN = {
    "h100": GPUFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, _SHARED, 84_900_000_000, 84_300_000_000),
    "h200": GPUFacts("NVIDIA H200", (9, 0), 132, _SHARED, 150_100_000_000, 149_500_000_000),
}


def known_gpu(name: str) -> GPUFacts:
    """Raises ConfigError for a name that KNOWN lacks."""
    if name not in KNOWN:
        raise ConfigError(f"gpu is {name!r}; known are {', '.join(KNOWN)}, and the one of this machine")
    return KNOWN[name]


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; off CUDA an H200's, so that grids are the same when kernels are interpreted."""
    if device.type != "cuda":
        return KNOWN["h200"].multiprocessors
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; off CUDA an H200's."""
    if device.type != "cuda":
        return KNOWN["h200"].shared_memory
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU, such as (9, 0); elsewhere (0, 0), which supports nothing."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 itself."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def gpu_count() -> int:
    """GPUs that torch can use. Asks the driver, which takes a while at first."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_gpus() -> int:
    """GPUs that there seem to be. Does not start the driver."""
    return torch.cuda.device_count()


def gpu_started() -> bool:
    """Whether this process uses a GPU."""
    return torch.cuda.is_initialized()


def use_gpu(device: torch.device) -> None:
    """Makes it the one that this thread's work goes to."""
    torch.cuda.set_device(device)


def free_device_bytes(device: torch.device) -> int:
    """Memory that a GPU has left, without that which torch keeps; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def begin_peak(device: torch.device) -> int:
    """Bytes of a GPU's memory that tensors take now, from where `peak_bytes` measures."""
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of a GPU's memory that tensors took since `begin_peak`."""
    return torch.cuda.max_memory_allocated(device)


def release_kept_memory() -> None:
    """Gives the driver what torch keeps without using it."""
    torch.cuda.empty_cache()


def pinned_empty(size: int, dtype: torch.dtype) -> torch.Tensor:
    """[size] of page-locked main memory, from torch's own allocator."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def page_lock(buffer: torch.Tensor) -> int:
    """Page-locks main memory for a GPU where it is. Returns CUDA's error, 0 for none."""
    return int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))


def synchronize(device: torch.device) -> None:
    """Waits until what was launched on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Event(Protocol):
    """A point in what was launched on a device."""

    def record(self) -> None:
        """The point is here now."""

    def query(self) -> bool:
        """Whether the device has come so far."""

    def synchronize(self) -> None:
        """Waits until it has."""


class _Past:
    """On a CPU everything launched is done."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


PAST = _Past()


def record_event(device: torch.device, event: Event = PAST) -> Event:
    """The end of what was launched so far, in an event that may be used again."""
    if device.type != "cuda":
        return PAST
    if event is PAST:
        event = torch.cuda.Event()
    event.record()
    return event


def wait_in_stream(event: Event, device: torch.device) -> None:
    """What is launched from here on starts after the event. The host does not wait."""
    if event is not PAST:
        stream: Any = torch.cuda.current_stream(device)
        stream.wait_event(event)


def is_capturing() -> bool:
    """Whether what is launched is recorded in a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts, for any thread, in which work goes where this thread's goes now."""
    if device.type != "cuda":
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream(device))


class SideStream:
    """A second stream of a device. On a CPU there is none: all work is done in its turn."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """What is launched within runs after what was launched before, and next to what comes later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on runs after all that was launched in this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class GraphCapture:
    """Records graphs on a stream of its own, in one memory pool for all of them."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._mode = ""
        self._pieces: list[torch.cuda.CUDAGraph] = []  # of the capture that is going on

    def record(self, step: Callable[[], None], mode: str) -> Callable[[], None]:
        """Runs a step as a recording, and returns what replays it.

        Args:
            mode: of CUDA: calls of other threads that end a capture.
        """
        self._mode = mode
        torch.cuda.synchronize()
        # torch.cuda.graph gives all cached memory back before every capture, which takes longer than the capture.
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                step()
            finally:
                pieces, self._pieces = self._pieces, []
                pieces[-1].capture_end()
        return pieces[0].replay if len(pieces) == 1 else partial(_replay, pieces)

    def split(self) -> None:
        """In a step: ends one graph and begins the next. Does nothing outside of `record`."""
        if self._pieces:
            self._pieces[-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        self._pieces.append(torch.cuda.CUDAGraph())
        self._pieces[-1].capture_begin(self._pool, capture_error_mode=self._mode)


def _replay(pieces: Sequence[torch.cuda.CUDAGraph]) -> None:
    for piece in pieces:
        piece.replay()
