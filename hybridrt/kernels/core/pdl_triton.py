"""Programmatic dependent launch (CUDA 13 programming guide, "Programmatic Dependent Launch and Synchronization").

Kernels of a step are short, and half of a short kernel is its start. A kernel launched with `pdl(device)` starts while
its predecessor still runs, does what does not depend on it (addresses, weights), and waits in `begin` until everything
before it has finished and is visible. Two rules: every program of such a kernel calls `begin`, also one that exits
early; and before it no program touches anything that a kernel of the same step writes, not even to overwrite it. Behind
a kernel that calls `begin_in_turn` instead, what came before that kernel may be read early too.

A kernel that is launched without `pdl` waits for all that came before it, and nothing behind it starts before it has
ended. So what was written in front of such a kernel may be read early by all kernels behind it. What the kernel itself
writes may not: CUDA may start the next kernel before these writes are visible. In front of the layers of a step there
is such a kernel always: PyTorch's token embedding. The step's metadata (state slots, positions, lengths, page tables)
is written in front of it, or in another graph. Recurrent layers of an eager step fill theirs behind the embedding, and
call `end_launches`. So a kernel of a layer may read early the step's metadata, and the states, conv rings and state
rings that earlier steps left to its layer.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from hybridrt.base.device import capability


@cache
def pdl(device: torch.device) -> dict[str, bool]:
    """Keywords of a kernel's launch: its constexpr PDL, and Triton's own option where the GPU supports it. Needs
    compute capability 9.0; elsewhere `begin` is empty."""
    if capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets the next kernel start its programs, then waits for all kernels before this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_in_turn(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits for all kernels before this one, then lets the next kernel start its programs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
