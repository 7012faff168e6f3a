"""Draft trees as bits: one integer per node holds the set of its ancestors.

Shapes: B rows, T nodes a row (node 0 is the root, the last known token; parents come first; T <=
31).
"""

import torch
from torch import Tensor


def tree_mask(ancestors: Tensor) -> Tensor:
    """[B, T, T] bool: node t sees j if bit j of its `ancestors` [B, T] int32 is set."""
    nodes = torch.arange(ancestors.shape[1], dtype=torch.int32, device=ancestors.device)
    return (ancestors[:, :, None] >> nodes & 1).bool()


def tree_positions(places: Tensor, mask: Tensor) -> Tensor:
    """Positions [B * T] int32 of tree nodes from their places [B * T] in the KV cache: places are
    consecutive, but siblings share a position."""
    order = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
    return places + (node_depths(mask) - order).view(-1)


def node_depths(mask: Tensor) -> Tensor:
    """[B, T] int32 distance of each node from the root; `mask` as in `tree_mask`."""
    return mask.sum(-1, dtype=torch.int32) - 1
