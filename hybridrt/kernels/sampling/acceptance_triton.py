"""Triton kernel of `accept_chain`: one launch at the end of a verify step."""

import torch
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import next_power_of_2


@jit_kernel
def _accept_chain_kernel(  # type: ignore[no-untyped-def]
    drawn_ptr, drafts_ptr, num_drafts_ptr, rows_ptr, last_ptr, accepted_ptr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, i = tl.program_id(0), tl.arange(0, BLOCK)
    mask = i < tl.minimum(tl.load(num_drafts_ptr + b), T - 1)
    drawn = tl.load(drawn_ptr + b * T + i, mask=mask, other=-1)
    drafts = tl.load(drafts_ptr + b * (T - 1) + i, mask=mask, other=-1)
    kept = tl.min(tl.where(mask & (drawn == drafts), T, i), 0)
    tl.store(accepted_ptr + b, kept + 1)
    tl.store(last_ptr + tl.load(rows_ptr + b), tl.load(drawn_ptr + b * T + kept).to(tl.int32))


def accept_chain_triton(drawn: Tensor, drafts: Tensor, num_drafts: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """drawn and drafts are contiguous."""
    batch, tokens = drawn.shape
    accepted = torch.empty(batch, dtype=torch.int32, device=drawn.device)
    _accept_chain_kernel[(batch,)](
        drawn, drafts, num_drafts, rows, last_tokens, accepted, T=tokens,
        BLOCK=max(2, next_power_of_2(tokens)), num_warps=1,
    )  # fmt: skip
    return accepted
