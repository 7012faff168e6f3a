"""The one place that asks torch about a GPU: facts, memory, events, streams and graphs.

On a CPU work is done when it is launched: events and streams do nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

from hybridrt.base.errors import ConfigError, DeviceError
from hybridrt.base.gpus import GPUS


@dataclass(frozen=True)
class GPUFacts:
    """What kernels and the memory plan need to know of a GPU.

    Attributes:
        capability: such as (9, 0).
        shared_memory: most bytes that a program may have.
        total_bytes, free_bytes: size of its memory, and what is free.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    total_bytes: int
    free_bytes: int

    @classmethod
    def of_device(cls, device: torch.device) -> "GPUFacts":
        """Facts of a device of this machine. Memory that torch keeps without using it counts as
        free."""
        found: Any = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        capability = (found.major, found.minor)
        shared = int(found.shared_memory_per_block_optin)
        return cls(found.name, capability, found.multi_processor_count, shared, total, free)


# Bytes as the driver gives them on an idle GPU. We did not run on the last four: theirs are estimates.
_SHARED, _LITTLE_SHARED, _IDLE = 227 << 10, 99 << 10, 600_000_000


def _estimated(gpu: str, name: str, multiprocessors: int, shared_memory: int) -> GPUFacts:
    memory, capability = GPUS[gpu]
    return GPUFacts(name, capability, multiprocessors, shared_memory, memory, memory - _IDLE)


KNOWN = {
    "h100": GPUFacts("NVIDIA H100 80GB HBM3", (9, 0), 132, _SHARED, 84_900_000_000, 84_300_000_000),
    "h200": GPUFacts("NVIDIA H200", (9, 0), 132, _SHARED, 150_100_000_000, 149_500_000_000),
    "a100": _estimated("a100", "NVIDIA A100-SXM4-80GB", 108, 163 << 10),
    "l40s": _estimated("l40s", "NVIDIA L40S", 142, _LITTLE_SHARED),
    "b200": _estimated("b200", "NVIDIA B200", 148, _SHARED),
    "rtx5090": _estimated("rtx5090", "NVIDIA GeForce RTX 5090", 170, _LITTLE_SHARED),
}


def known_gpu(name: str) -> GPUFacts:
    """Raises ConfigError for a name that KNOWN lacks."""
    if name not in KNOWN:
        raise ConfigError(f"gpu is {name!r}; known are {', '.join(KNOWN)}, and the one of this machine")
    return KNOWN[name]


@cache
def multiprocessors(device: torch.device) -> int:
    """Off CUDA an H200's, so that grids are the same when kernels are interpreted."""
    if device.type != "cuda":
        return KNOWN["h200"].multiprocessors
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory for a program; off CUDA an H200's."""
    if device.type != "cuda":
        return KNOWN["h200"].shared_memory
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def capability(device: torch.device) -> tuple[int, int]:
    """Such as (9, 0); (0, 0), which supports nothing, without a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 in hardware."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def has_float8(device: torch.device, gpu: str | None = None) -> bool:
    """Whether the device converts float8_e4m3fn numbers in hardware; a CPU does without.

    Args:
        gpu: a name of GPUS that `device` means; it need not be here.
    """
    return device.type != "cuda" or (capability(device) if gpu is None else GPUS[gpu].capability) >= (8, 9)


def gpu_name(device: torch.device, gpu: str | None = None) -> str:
    """`gpu`: as `has_float8` takes it."""
    return torch.cuda.get_device_name(device) if gpu is None else gpu


def gpu_count() -> int:
    """GPUs that torch can use. Asks the driver, which is slow the first time."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def visible_gpus() -> int:
    """GPUs that there seem to be. Does not start the driver."""
    return torch.cuda.device_count()


def gpu_started() -> bool:
    """Whether this process uses a GPU."""
    return torch.cuda.is_initialized()


def resolve_device(name: str) -> torch.device:
    """The device of a name: "cpu", "cuda" or "cuda:N". "auto" is the first GPU, or the CPU without
    one. DeviceError if the name is another one or the device does not exist."""
    if name == "auto":
        name = "cuda" if gpu_count() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise DeviceError(f'device is {name!r}; use "auto", "cpu", "cuda" or "cuda:N"') from e
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f'device is {name!r}; hybridrt runs on "cpu" and "cuda"')
    if device.type == "cuda":
        if (device.index or 0) >= (count := gpu_count()):
            raise DeviceError(f'device is {name!r}, but torch sees {count} CUDA devices; use device="cpu"')
        device = torch.device("cuda", device.index or 0)
    return device


def use_gpu(device: torch.device) -> None:
    """Makes it the current device of this thread."""
    torch.cuda.set_device(device)


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a GPU, without what torch keeps; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def begin_peak(device: torch.device) -> int:
    """Starts a measurement of `peak_bytes`. Returns the bytes that tensors occupy now."""
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors occupied since `begin_peak`."""
    return torch.cuda.max_memory_allocated(device)


def release_kept_memory() -> None:
    """Returns unused memory that torch keeps to the driver."""
    torch.cuda.empty_cache()


def pinned_empty(size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """[size], or of the shape `size`, of page-locked main memory, from torch's allocator."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def page_lock(buffer: torch.Tensor) -> int:
    """Page-locks existing main memory. Returns CUDA's error, 0 for none."""
    return int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))


def gpu_identity(device: torch.device) -> str:
    """A name of a GPU that is the same in all processes of this host."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_of(identity: str) -> int | None:
    """The number that a GPU has in this process; None: it is not visible here."""
    numbers = range(torch.cuda.device_count())
    return next((i for i in numbers if gpu_identity(torch.device("cuda", i)) == identity), None)


def reaches(device: torch.device, other: int) -> bool:
    """Whether kernels of a GPU can use the memory of GPU number `other`."""
    return device.index == other or torch.cuda.can_device_access_peer(device.index, other)


def synchronize(device: torch.device) -> None:
    """Waits for all work launched on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceEvent(Protocol):
    """A point in the work that is launched on a device."""

    def record(self) -> None:
        """Moves the point to here."""

    def query(self) -> bool:
        """Whether the device has reached the point."""

    def synchronize(self) -> None:
        """Waits until the device has reached the point."""


class _Past:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


PAST = _Past()


def record_event(device: torch.device, event: DeviceEvent = PAST) -> DeviceEvent:
    """The end of the work launched so far. `event` is reused if there is one."""
    if device.type != "cuda":
        return PAST
    if event is PAST:
        event = torch.cuda.Event()
    event.record()
    return event


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    """Time that a GPU takes for what `run` launches. Waits for all earlier work and for this one."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def wait_in_stream(event: DeviceEvent, device: torch.device) -> None:
    """Work launched from here on starts after the event. The host does not wait."""
    if event is not PAST:
        stream: Any = torch.cuda.current_stream(device)
        stream.wait_event(event)


def is_capturing() -> bool:
    """Whether launches are being recorded in a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts, for any thread, in which work goes to this thread's current stream."""
    if device.type != "cuda":
        return nullcontext
    return partial(torch.cuda.stream, torch.cuda.current_stream(device))


class SideStream:
    """A second stream of a device. A CPU has none: all work runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Work launched inside starts after all earlier work, and runs next to later work."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.next_to_current():
            yield

    def next_to_current(self) -> AbstractContextManager[object]:
        """Work launched inside waits for no work of other streams."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def uses(self, tensor: torch.Tensor) -> None:
        """The tensor's memory is reused only after the work that was launched on this stream."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Work launched from here on runs after all work of this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class GraphCapture:
    """Records graphs on its own stream, in one memory pool for all of them."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._mode = ""
        self._pieces: list[torch.cuda.CUDAGraph] = []  # pieces of the capture that is going on

    def record(self, step: Callable[[], None], mode: str) -> Callable[[], None]:
        """Runs a step as a recording, and returns a function that replays it.

        Args:
            mode: CUDA's capture mode: which calls of other threads end a capture.
        """
        self._mode = mode
        torch.cuda.synchronize()
        # torch.cuda.graph empties the memory cache before every capture, which is slow.
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                step()
            finally:
                pieces, self._pieces = self._pieces, []
                pieces[-1].capture_end()
        return pieces[0].replay if len(pieces) == 1 else partial(_replay, pieces)

    def split(self) -> None:
        """Within a step: ends one graph and starts the next. Does nothing outside of `record`."""
        if self._pieces:
            self._pieces[-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        self._pieces.append(torch.cuda.CUDAGraph())
        self._pieces[-1].capture_begin(self._pool, capture_error_mode=self._mode)


def _replay(pieces: Sequence[torch.cuda.CUDAGraph]) -> None:
    for piece in pieces:
        piece.replay()
