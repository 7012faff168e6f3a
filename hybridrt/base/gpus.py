"""GPUs by name, for plans without the GPU."""

from typing import NamedTuple

_GIB = 2**30


class NamedGPU(NamedTuple):
    """
    Attributes:
        memory: bytes as CUDA reports them, a little less than the data sheets.
        capability: such as (9, 0).
    """

    memory: int
    capability: tuple[int, int]


GPUS = {
    "h100": NamedGPU(int(79.1 * _GIB), (9, 0)),
    "h200": NamedGPU(int(139.8 * _GIB), (9, 0)),
    "b200": NamedGPU(int(178.3 * _GIB), (10, 0)),
    "a100": NamedGPU(int(79.1 * _GIB), (8, 0)),
    "a100-40gb": NamedGPU(int(39.4 * _GIB), (8, 0)),
    "l40s": NamedGPU(int(44.4 * _GIB), (8, 9)),
    "l4": NamedGPU(int(22.0 * _GIB), (8, 9)),
    "rtx4090": NamedGPU(int(23.5 * _GIB), (8, 9)),
    "rtx5090": NamedGPU(int(31.4 * _GIB), (12, 0)),
}
