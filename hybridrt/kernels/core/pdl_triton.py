"""Programmatic dependent launch: a kernel starts while its predecessor still runs.

Half of a short kernel's time is its start (CUDA 13 programming guide, "Programmatic Dependent
Launch and Synchronization"). A kernel launched with `pdl(device)` first does independent work
(addresses, weights), then waits in `begin` until all earlier kernels have finished and their writes
are visible. Rules:

- Every program of such a kernel calls `begin`, even one that exits early, unless another program of
  the same launch is sure to: the kernel ends after that one, and a program that ends lets the next
  kernel start.
- Before `begin`, no program reads or overwrites what a kernel of the same step writes.
- The kernel after one that calls `begin_in_turn` may read, before its own `begin`, what was written before
  that one.

A kernel without `pdl` waits for all kernels before it, and none after it starts before its end.
Later kernels may read early what was written before it, not its own writes. PyTorch's token
embedding is such a kernel, before all layers. The step's metadata (slots, positions, lengths, page
tables) is written before it or in another graph; in eager steps recurrent layers write theirs after
it and call `end_launches`. So a layer's kernel may read early the step's metadata, and what earlier
steps left to its layer.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from hybridrt.base.device import capability


@cache
def pdl(device: torch.device) -> dict[str, bool]:
    """Launch keywords: the constexpr PDL, and Triton's own option where the GPU supports it
    (compute capability 9.0 and later). Elsewhere `begin` is empty."""
    if capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets the next kernel start, then waits for all kernels before this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_in_turn(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for all kernels before this one, then lets the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
