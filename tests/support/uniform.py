"""The uniform numbers that draws are made from, as an operation: the plain-torch ones, and those of the kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.sampling import sampling
from hybridrt.kernels.sampling.sampling_triton import _uniform


@operation(By("triton", f"{__name__}:uniform_triton"))
def uniform(seed: Tensor, index: Tensor, stream: int, ids: Tensor) -> Tensor:
    """As hybridrt.kernels.sampling.sampling.uniform."""
    return sampling.uniform(seed, index, stream, ids)


@triton.jit
def _kernel(seeds_ptr, indices_ptr, ids_ptr, out_ptr, n, STREAM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, mask=i < n, other=0).to(tl.int64)
    u = _uniform(tl.load(seeds_ptr + b), tl.load(indices_ptr + b), tl.full([], STREAM, tl.int64), ids)
    tl.store(out_ptr + b * n + i, u, mask=i < n)


def uniform_triton(seed: Tensor, index: Tensor, stream: int, ids: Tensor) -> Tensor:
    """The numbers as the kernel of `sample` makes them."""
    out = torch.empty(seed.shape[0], ids.shape[0], dtype=torch.float32, device=seed.device)
    block = triton.next_power_of_2(len(ids))
    _kernel[(len(seed),)](seed, index, ids, out, len(ids), STREAM=stream, BLOCK=block)
    return out
