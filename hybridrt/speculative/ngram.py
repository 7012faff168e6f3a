"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrt.speculative.drafter import Draft, DraftRequest
from hybridrt.speculative.tree import merge

Ngram = tuple[int, ...]


@dataclass(slots=True)
class _Index:
    """Of one request: positions after each n-gram, in order, of the text up to `done`."""

    request: DraftRequest
    after: dict[Ngram, list[int]] = field(default_factory=dict)
    done: int = 1


class NgramDrafter:
    """Looks the last `longest` tokens up in the request's own text, then fewer, down to `shortest`.

    Each request has an index from n-gram to the positions after it, extended as the text grows, so that a proposal
    costs the new tokens alone.

    Args:
        topk: matches whose continuations are proposed together: the latest ones of the longest n-gram first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, topk: int = 1) -> None:
        self.longest, self.shortest, self.topk = longest, shortest, topk
        self._indices: dict[int, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        done = [key for key, index in self._indices.items() if index.request.finish_reason is not None]
        for key in done:
            del self._indices[key]
        return [self._lookup(request, n) for request, n in zip(requests, most)]

    def _lookup(self, request: DraftRequest, most: int) -> Draft:
        text = request.tokens
        return merge([_continue(text, after, most) for after in self._matches(request, text)], most)

    def _matches(self, request: DraftRequest, text: list[int]) -> list[int]:
        """Positions after at most `topk` earlier occurrences of what ends the text."""
        index, found = self._index(request, text), list[int]()
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            latest_first = reversed(index.get(tuple(text[-size:]), ()))
            for after in latest_first:
                if len(found) == self.topk:
                    return found
                if after not in found:
                    found.append(after)
        return found

    def _index(self, request: DraftRequest, text: list[int]) -> dict[Ngram, list[int]]:
        """Positions after each n-gram, up to but without the one that ends the text."""
        index = self._indices.setdefault(id(request), _Index(request))
        for end in range(index.done, len(text)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                positions = index.after.setdefault(tuple(text[end - size : end]), [])
                positions.append(end)
                del positions[: -self.topk]
        index.done = max(index.done, len(text))
        return index.after


def _continue(text: list[int], after: int, most: int) -> list[int]:
    """Tokens from `after` on; a match that runs into the end of the text goes on with what it predicted."""
    drafts: list[int] = []
    for position in range(after, after + most):
        drafts.append(text[position] if position < len(text) else drafts[position - len(text)])
    return drafts
