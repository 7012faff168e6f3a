"""Facts of a GPU: of one that is here, or of one that kernels are compiled for. No other file names a chip."""

from dataclasses import dataclass
from typing import Any

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
