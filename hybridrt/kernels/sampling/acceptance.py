"""Accepts the drafts that equal what plain sampling would have drawn.

A verify step draws a target token at every position with plain decoding's random numbers (keyed by
seed and output index). A draft is accepted while it equals the draw, so output equals plain output
for every drafter. A deterministic draft d is accepted with probability p(d), as in rejection
sampling (Leviathan et al. 2023; for equal random numbers Daliri et al. 2025, Gumbel coupling). In a
tree, the draw selects the equal child.

A draft tree is known by two relations between the T inputs of a row: which one each follows (its
parent, before it), and which ones it sees (its ancestors and itself).
"""

import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation


def accept(
    drawn: Tensor, drafts: Tensor, num_drafts: Tensor, rows: Tensor, last_tokens: Tensor,
    predecessors: Tensor | None = None, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Accepts inputs of B rows; arguments as in `accept_chain` and, for trees, `accept_tree`.

    Returns:
        (tokens [B, T] int64 drawn after the inputs that stay, in order; their number [B] int32;
            their places [B, T] int64, or None: they are the first ones).
    """
    if predecessors is None or mask is None:
        return drawn, accept_chain(drawn, drafts, num_drafts, rows, last_tokens), None
    counts, path = accept_tree(drawn, drafts, num_drafts, predecessors, mask)
    tokens = drawn.gather(1, path)
    last_tokens[rows] = tokens.gather(1, counts[:, None].long() - 1)[:, 0].int()
    return tokens, counts, path


@operation(By("triton"))
def accept_chain(drawn: Tensor, drafts: Tensor, num_drafts: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """Accepted inputs of each row, [B] int32: the root and leading drafts that equal their draws.

    Args:
        drawn: [B, T] int64, the target's draw after each input; -1 if logits were not finite.
        drafts: [B, T - 1] int32, the inputs after the root.
        num_drafts: [B] int32, how many of them are drafts; the rest is padding.
        rows: [B] int32 request rows.
        last_tokens: [R + 1] int32; gets each row's next root, the draw after the last accepted
            input.
    """
    index = torch.arange(drafts.shape[1], device=drafts.device)
    same = (drawn[:, :-1] == drafts) & (index < num_drafts[:, None])
    kept = same.int().cumprod(1).sum(1)
    last_tokens[rows] = drawn.gather(1, kept[:, None])[:, 0].int()
    return (1 + kept).int()


@operation()
def accept_tree(
    drawn: Tensor, drafts: Tensor, num_drafts: Tensor, parents: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The path of drawn nodes: each equals its parent's draw.

    Args:
        drawn, drafts, num_drafts: those of `accept_chain`; draft t is node t + 1.
        parents: [B, T] int32, each node's parent, -1 for the root.
        mask: [B, T, T] bool, each node's ancestors and itself.

    Returns:
        (accepted [B] int32, nodes of the path; path [B, T] int64, the nodes from the root on, then
            0s).
    """
    nodes = torch.arange(mask.shape[1], device=mask.device)
    chosen = drawn.gather(1, parents.clamp(min=0).long())[:, 1:] == drafts
    chosen = torch.cat((torch.ones_like(chosen[:, :1]), chosen), 1) & (nodes <= num_drafts[:, None])
    alive = ~(mask & ~chosen[:, None]).any(-1)
    depth = mask.sum(-1) - 1
    last = torch.where(alive, depth, -1).argmax(1, keepdim=True)
    on_path = mask.gather(1, last[:, :, None].expand(-1, -1, mask.shape[2])).squeeze(1)
    # Every node writes itself at its depth; nodes off the path to a column that is cut off.
    path = torch.zeros(mask.shape[0], mask.shape[1] + 1, dtype=torch.long, device=mask.device)
    path.scatter_(1, torch.where(on_path, depth, mask.shape[1]), nodes.expand_as(depth))
    return (depth.gather(1, last).squeeze(1) + 1).int(), path[:, :-1]
