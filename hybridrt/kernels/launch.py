"""What the launchers of the Triton kernels share."""

from functools import cache

import torch

H200_MULTIPROCESSORS = 132


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; off CUDA an H200's, so that grids are the same when kernels are interpreted."""
    if device.type != "cuda":
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision: float32 operands are split in three for TF32, which keeps float32's accuracy."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
