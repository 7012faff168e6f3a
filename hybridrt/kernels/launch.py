"""What the launchers of the Triton kernels share."""

from functools import cache

import torch

H200_MULTIPROCESSORS, H200_SHARED_MEMORY = 132, 227 << 10


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; off CUDA an H200's, so that grids are the same when kernels are interpreted."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; off CUDA an H200's."""
    if device.type != "cuda":
        return H200_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # the stub lacks it


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision: float32 operands are split in three for TF32, which keeps float32's accuracy."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
