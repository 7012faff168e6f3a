"""Drafts: chains and trees of tokens that may follow a request's last known one."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrt.base.errors import EngineError


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a request's last known one: a chain, or the nodes of a tree.

    Attributes:
        parents: None for a chain; of a tree, the index of each token's parent among (last known,
            *tokens). A parent comes before its children.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None

    def __post_init__(self) -> None:
        parents = self.parents
        if parents is not None and (
            len(parents) != len(self.tokens) or any(not 0 <= p <= i for i, p in enumerate(parents))
        ):
            raise EngineError(
                f"{len(self.tokens)} drafts with parents {list(parents)}: each needs one that precedes it"
            )

    @classmethod
    def of_tree(cls, tokens: Sequence[int], parents: Sequence[int]) -> "Draft":
        """A tree; one without a fork becomes a chain."""
        return cls(tokens, None if list(parents) == list(range(len(parents))) else parents)

    @classmethod
    def from_columns(cls, tokens: np.ndarray, parents: np.ndarray | None) -> "Draft":
        """A row of `DecodeRows`: its drafts, and what they follow."""
        return cls(tokens.tolist()) if parents is None else cls.of_tree(tokens.tolist(), parents.tolist())

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents is None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """The most drafts that can be accepted."""
        if self.parents is None:
            return len(self.tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)

    def followers(self, node: int) -> Sequence[int]:
        """The nodes after a node: 0 is the last known token, i + 1 is tokens[i]."""
        if self.parents is None:
            return [node + 1] if node < len(self) else []
        return [i for i, parent in enumerate(self.parents, 1) if parent == node]

    def only(self, kept: Collection[int]) -> "Draft":
        """The draft of these nodes alone. Each follows one of them or the last known token."""
        nodes = sorted(kept)
        number = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        parents = [number[node - 1 if self.parents is None else self.parents[node - 1]] for node in nodes]
        return Draft.of_tree([self.tokens[node - 1] for node in nodes], parents)

    def first(self, max_drafts: int) -> "Draft":
        """The first `max_drafts` tokens."""
        if len(self) <= max_drafts:
            return self
        return Draft(self.tokens[:max_drafts], None if self.parents is None else self.parents[:max_drafts])

    def until(self, ends: Callable[[Sequence[int]], bool]) -> "Draft":
        """The draft without tokens past the end of the request.

        Args:
            ends: whether the request ends within these tokens, if they come next.
        """
        if self.parents is None:
            if not self.tokens or not ends(self.tokens):
                return self
            return self.first(next(n for n in range(1, len(self) + 1) if ends(self.tokens[:n])))
        tokens, parents, places, paths = list[int](), list[int](), [0], list[list[int] | None]([[]])
        for token, parent in zip(self.tokens, self.parents, strict=True):
            path = paths[parent]  # None: it has ended
            if path is not None:
                path = [*path, token]
                tokens.append(token)
                parents.append(places[parent])
            places.append(len(tokens))
            paths.append(None if path is None or ends(path) else path)
        return Draft.of_tree(tokens, parents)


NO_DRAFT = Draft()


def draft_columns(drafts: Sequence[Draft]) -> tuple[list[Sequence[int]], list[Sequence[int] | None]]:
    """Each draft's tokens, and what they follow, as `DecodeRows.with_drafts` takes them."""
    return [d.tokens for d in drafts], [d.parents for d in drafts]


def merge(chains: Sequence[Sequence[int]], max_drafts: int) -> Draft:
    """The tree of all chains, cut to `max_drafts` tokens: near tokens first, then earlier chains. A
    tree without a fork is a chain."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    ends = [0] * len(chains)  # the node that each chain has reached; 0 is the root
    for depth in range(max(map(len, chains), default=0)):
        for i, chain in enumerate(chains):
            if depth >= len(chain):
                continue
            edge = ends[i], chain[depth]
            if edge not in children:
                if len(tokens) == max_drafts:
                    return Draft.of_tree(tokens, parents)
                tokens.append(chain[depth])
                parents.append(ends[i])
                children[edge] = len(tokens)
            ends[i] = children[edge]
    return Draft.of_tree(tokens, parents)


def with_others(chain: Sequence[int], others: Sequence[Sequence[int]], max_drafts: int) -> Draft:
    """A chain and other likely tokens at each of its places, cut to `max_drafts` tokens."""
    likely = [[*chain[:i], token] for i, tokens in enumerate(others) for token in tokens]
    return merge([chain, *likely], max_drafts)
