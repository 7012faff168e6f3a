"""Paths in draft trees."""

from collections.abc import Sequence

from torch import Tensor


def ancestry(parents: Sequence[int] | Tensor, node: int) -> list[int]:
    """The nodes from the root to `node`; parents[i] is the parent of node i, negative for a root."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path
