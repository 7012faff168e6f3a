"""Prompt lookup: what followed the last few tokens the last time they occurred (Saxena 2023)."""

from collections.abc import Sequence

from hybridrt.speculative.drafter import DraftRequest


class NgramDrafter:
    """Looks the last `longest` tokens up in the request's own text, then fewer, down to `shortest`.

    Each request has an index from n-gram to the position after its latest occurrence, extended as the text grows, so
    that a proposal costs the new tokens alone.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest
        self._indices: dict[int, tuple[DraftRequest, dict[tuple[int, ...], int], int]] = {}

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[list[int]]:
        done = [key for key, (request, *_) in self._indices.items() if request.finish_reason is not None]
        for key in done:
            del self._indices[key]
        return [self._lookup(request, n) for request, n in zip(requests, most)]

    def _lookup(self, request: DraftRequest, most: int) -> list[int]:
        text = request.tokens
        index = self._index(request, text)
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            after = index.get(tuple(text[-size:]))
            if after is not None:
                return self._continue(text, after, most)
        return []

    @staticmethod
    def _continue(text: list[int], after: int, most: int) -> list[int]:
        """Tokens from `after` on; a match that runs into the end of the text goes on with what it predicted."""
        drafts: list[int] = []
        for i in range(most):
            position = after + i
            drafts.append(text[position] if position < len(text) else drafts[position - len(text)])
        return drafts

    def _index(self, request: DraftRequest, text: list[int]) -> dict[tuple[int, ...], int]:
        """Positions after each n-gram, up to but without the one that ends the text."""
        _, index, done = self._indices.get(id(request), (request, {}, 1))
        for end in range(done, len(text)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                index[tuple(text[end - size : end])] = end
        self._indices[id(request)] = (request, index, max(done, len(text)))
        return index
