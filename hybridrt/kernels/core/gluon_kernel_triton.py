"""Gluon functions that the host launches: layouts and roles of warps are written out.

They are apart from other kernels, which so do not need what is experimental in Triton.
"""

from functools import partial
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import tma

from hybridrt.kernels.core.jit_kernel_triton import JitKernel

# Triton 3.6 has other names for these.
copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
join_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


class GluonKernel(JitKernel, GluonJITFunction[Any]):
    """It has no interpreter."""


def gluon_kernel(**options: Any) -> Any:
    """As `gluon.jit`, for functions that the host launches."""
    return partial(GluonKernel, **options)
