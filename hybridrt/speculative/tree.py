"""Merges guessed continuations into one draft tree."""

from collections.abc import Sequence

from hybridrt.speculative.drafter import Draft


def merge(chains: Sequence[Sequence[int]], max_drafts: int) -> Draft:
    """The tree of all chains, cut to `max_drafts` tokens: near tokens first, then earlier chains. A
    tree without a fork is a chain."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    ends = [0] * len(chains)  # the chain's node; 0 is the root
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


def with_siblings(chain: Sequence[int], siblings: Sequence[Sequence[int]], max_drafts: int) -> Draft:
    """A chain and other likely tokens at each of its places, cut to `max_drafts` tokens."""
    others = [[*chain[:i], token] for i, tokens in enumerate(siblings) for token in tokens]
    return merge([chain, *others], max_drafts)
