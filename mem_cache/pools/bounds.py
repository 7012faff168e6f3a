"""Range checks of numbers on a device: always on a CPU, elsewhere with HYBRIDRT_DEBUG=1."""

import os

import torch

from hybridrt.base.device import is_capturing
from hybridrt.base.errors import HybridrtError, PoolError

# With HYBRIDRT_DEBUG=1, values on the device are checked too, which waits for the device.
DEBUG = os.environ.get("HYBRIDRT_DEBUG") == "1"


def may_look(device: torch.device) -> bool:
    """True if the host may read values of a device. It may not while a graph is recorded."""
    return device.type == "cpu" or (DEBUG and not is_capturing())


def check_range(name: str, values: torch.Tensor, end: int, error: type[HybridrtError] = PoolError) -> None:
    """Raises `error` unless all values are in [0, end), if they may be read."""
    if values.numel() and may_look(values.device):
        low, high = map(int, torch.aminmax(values))
        if low < 0 or high >= end:
            raise error(f"{name} holds {low if low < 0 else high}; valid are 0 to {end - 1}")
