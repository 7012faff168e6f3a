"""Worths of a radix tree's states: GreedyDual over two classes, and above it states that requests wait for."""

from collections.abc import Collection
from dataclasses import dataclass

from hybridrt.mem_cache.radix_node import Node

AWAITED = 2.0**40  # above the worth of other states, and small enough for fractions of a token


@dataclass(slots=True)
class StateClass:
    """How many states of a class (final or not) were kept, and how many of them have been used."""

    made: int = 0
    used: int = 0

    @property
    def share(self) -> float:
        """The share that was used, with four used states added to both counts: the first few states then decide
        nothing."""
        return (self.used + 4) / (self.made + 4)


class StateWorths:
    """Worths of a tree's states.

    Attributes:
        inflation: GreedyDual's L: the greatest worth of a state that was evicted.
        admitted: the latest arrival that waits no longer.
        classes: by Node.final.
    """

    def __init__(self) -> None:
        self.inflation = 0.0
        self.admitted = 0
        self.classes = {kind: StateClass() for kind in (0, 1, 2)}

    def of(self, node: Node) -> float:
        """GreedyDual's value of a node's state: the inflation at its last use, plus the tokens between the state before
        it and this one, weighted by how often states of its class are used."""
        if node.passed and not node.awaited:
            return 0.0
        saved = saved_tokens(node)
        if node.awaited:
            return self.awaited(saved, node.awaited)
        best = max(each.share for each in self.classes.values() if each.made)
        return node.base + saved * self.classes[node.kind].share / best

    def awaited(self, saved: int, arrivals: Collection[int]) -> float:
        """The worth of a state that saves so many tokens to each of these waiting requests: tokens by requests until
        then."""
        ahead = (max(arrival - self.admitted, 1) for arrival in sorted(arrivals))
        return AWAITED + max(saved * (i + 1) / n for i, n in enumerate(ahead))


def state_before(node: Node) -> Node | None:
    """The next node above that has a state."""
    return next((step for step in node.path if step is not node and step.state is not None), None)


def saved_tokens(node: Node) -> int:
    """Tokens between the state before a node's and its own."""
    before = state_before(node)
    return node.end - (before.end if before else 0)
