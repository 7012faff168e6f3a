"""Energy of GPUs during a load, from NVML's counters."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hybridrt.base.errors import DeviceError, ProviderNotInstalledError

IDLE_SECONDS = 5.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
Read = Callable[[], Sequence[float]]


@dataclass
class Energy:
    """Energy of a load.

    Attributes:
        gpus: how many were measured.
        idle_watts: of all of them before the load, with the model in memory.
        joules, seconds: of the load.
    """

    gpus: int = 0
    idle_watts: float = 0.0
    joules: float = 0.0
    seconds: float = 0.0

    def figures(self, summary: Mapping[str, Any]) -> dict[str, float]:
        """Joules for each token and request, less what an idle machine uses. `summary`: of
        hybridrt.bench.timing.summary."""
        net = max(self.joules - self.idle_watts * self.seconds, 0.0)
        done = summary["requests"] - summary["failed"]
        tokens = summary["prompt_tokens"] + summary["output_tokens"]

        def each(count: int) -> float:
            return net / count if count else 0.0

        return {
            "gpus": self.gpus, "idle_watts": self.idle_watts, "mean_watts": self.joules / max(self.seconds, 1e-9),
            "joules": self.joules, "joules_without_idle": net, "joules_per_request": each(done),
            "joules_per_output_token": each(summary["output_tokens"]), "joules_per_token": each(tokens),
        }  # fmt: skip


@contextmanager
def nvml() -> Iterator[Read]:
    """A function that reads the joules of each GPU since its driver was loaded: of those that
    CUDA_VISIBLE_DEVICES names, else of all of this machine. Others may work for somebody else. CUDA
    counts as NVML does if all GPUs are of one kind, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Raises:
        ProviderNotInstalledError: nvidia-ml-py is missing.
        DeviceError: there is no GPU of NVIDIA or none of a name, or one has no such counter (before
            Volta).
    """
    try:
        import pynvml
    except ImportError as e:
        raise ProviderNotInstalledError(f"--energy needs nvidia-ml-py ({e}): pip install '.[energy]'") from e
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise DeviceError(f"--energy needs a GPU of NVIDIA and its driver: {e}") from e
    try:
        gpus = _visible([pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())], pynvml)

        def read() -> list[float]:
            return [pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000 for gpu in gpus]

        read()
        yield read
    except pynvml.NVMLError as e:
        raise DeviceError(f"a GPU does not tell its energy: {e}") from e
    finally:
        pynvml.nvmlShutdown()


def _visible(gpus: Sequence[Any], pynvml: Any) -> Sequence[Any]:
    named = os.environ.get(VISIBLE)
    if named is None:
        return gpus
    found = [_of_name(name.strip(), gpus, pynvml) for name in named.split(",") if name.strip()]
    if not found:
        raise DeviceError(f"--energy: {VISIBLE} is {named!r}, which names no GPU")
    return found


def _of_name(name: str, gpus: Sequence[Any], pynvml: Any) -> Any:
    """By number, or by the beginning of its UUID."""
    if name.isdecimal() and int(name) < len(gpus):
        return gpus[int(name)]
    found = [gpu for gpu in gpus if name.startswith("GPU-") and pynvml.nvmlDeviceGetUUID(gpu).startswith(name)]
    if len(found) != 1:
        raise DeviceError(f"--energy: {VISIBLE} names {name!r}, which is none of {len(gpus)} GPUs")
    return found[0]


@contextmanager
def measured(read: Read) -> Iterator[Energy]:
    """Measures the idle machine first, then what runs inside. The record is whole at the end."""
    energy = Energy()
    before, start = read(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    after, end = read(), time.perf_counter()
    energy.gpus, energy.idle_watts = len(after), (sum(after) - sum(before)) / (end - start)
    try:
        yield energy
    finally:
        energy.seconds = time.perf_counter() - end
        energy.joules = sum(read()) - sum(after)
