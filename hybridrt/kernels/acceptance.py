"""How many drafts of a chain stay: those that equal what plain sampling would have drawn.

A verify step draws a token from the target at every position, with the random numbers that plain decoding would use
there (they are keyed by seed and output index). A draft stays while it equals that draw. The output is then the plain
output, token for token, sampled or greedy, whatever the drafter proposes; a deterministic draft d is kept with
probability p(d), as in rejection sampling (Leviathan et al. 2023), and a drafter that draws with the same random
numbers is coupled to the target (Daliri et al. 2025, Gumbel coupling).
"""

import torch
from torch import Tensor

from hybridrt.kernels.providers import register, select

register("accept_chain", "torch", "hybridrt.kernels.acceptance:accept_chain_reference")


def accept_chain(drawn: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """Inputs of each row that stay, the root included: 1 + leading drafts that equal their draws. [B] int32, >= 1.

    Args:
        drawn: [B, T] int64, the target's draw after each of the T inputs.
        drafts: [B, T - 1] int32, the inputs after the root.
        num_drafts: [B] int32, how many of them are drafts; the rest is padding.
    """
    accepted: Tensor = select("accept_chain", drawn.device.type)(drawn, drafts, num_drafts)
    return accepted


def accept_chain_reference(drawn: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    index = torch.arange(drafts.shape[1], device=drafts.device)
    same = (drawn[:, :-1] == drafts) & (index < num_drafts[:, None])
    return 1 + same.int().cumprod(1).sum(1, dtype=torch.int32)
