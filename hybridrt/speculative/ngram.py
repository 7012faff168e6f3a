"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023)."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from hybridrt.runtime.drafting import DraftMethod, Everywhere
from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.speculative.drafter import Draft, Drafter, DraftRequest, num_tokens, tokens_between
from hybridrt.speculative.tree import merge


class _Ngrams:
    """Where each n-gram of one size ended in a request's text, the one that ends the text apart. No text is kept: a
    hash stands for an n-gram, so that one in 2^64 pairs is taken for equal, which costs a draft that fails.

    An end is the position of the token that follows; 0 is none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._latest: dict[int, int] = {}  # end by hash
        self._earlier = array("i")  # of each n-gram in order: the end of the same one before it

    @property
    def start(self) -> int:
        """Of the first n-gram that is not taken in."""
        return len(self._earlier)

    def extend(self, text: Sequence[int], start: int) -> None:
        """Takes in what `text` adds. It begins at position `start`, no later than self.start, and goes to the end."""
        latest, earlier, new = self._latest, self._earlier, text[self.start - start : -1]
        ngrams = zip(*(new[i:] for i in range(self.size)))
        for end, key in enumerate(map(hash, ngrams), self.start + self.size):
            earlier.append(latest.get(key, 0))
            latest[key] = end

    def ends(self, ngram: Sequence[int]) -> Iterator[int]:
        """The latest first."""
        end = self._latest.get(hash(tuple(ngram)), 0)
        while end:
            yield end
            end = self._earlier[end - self.size]


class NgramDrafter(Drafter):
    """Looks the last `longest` tokens up in the request's own text, then fewer, down to `shortest`.

    Each request has an index of its n-grams, extended as the text grows, so that a proposal costs the new tokens alone.

    Args:
        topk: matches whose continuations are proposed together: the latest ones of the longest n-gram first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, topk: int = 1) -> None:
        self.longest, self.shortest, self.topk = longest, shortest, topk
        self._indices: dict[int, list[_Ngrams]] = {}

    def begin(self, request: DraftRequest) -> None:
        self._indices[request.arrival] = [_Ngrams(size) for size in range(self.longest, self.shortest - 1, -1)]

    def end(self, request: DraftRequest) -> None:
        self._indices.pop(request.arrival, None)

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        return [self._lookup(request, n) for request, n in zip(requests, most, strict=True)]

    def _lookup(self, request: DraftRequest, most: int) -> Draft:
        return merge([_continue(request, after, most) for after in self._matches(request)], most)

    def _matches(self, request: DraftRequest) -> list[int]:
        """Positions after at most `topk` earlier occurrences of what ends the text."""
        index, found = self._indices[request.arrival], list[int]()
        start = index[0].start  # the longest n-grams reach back furthest
        text = tokens_between(request, start, num_tokens(request))
        for ngrams in index:
            ngrams.extend(text, start)
            for end in islice(ngrams.ends(text[-ngrams.size :]), self.topk):
                if len(found) < self.topk and end not in found:
                    found.append(end)
        return found


def _continue(request: DraftRequest, after: int, most: int) -> list[int]:
    """Tokens from `after` on; a match that runs into the end of the text goes on with what it predicted."""
    drafts = tokens_between(request, after, after + most)
    period = num_tokens(request) - after
    while len(drafts) < most:
        drafts.append(drafts[-period])
    return drafts


class NgramMethod(DraftMethod):
    """On the host alone."""

    def drafter(self, runner: ModelRunner, everywhere: Everywhere) -> Drafter:
        assert runner.config.speculative is not None
        return NgramDrafter(topk=runner.config.speculative.topk)


METHOD = NgramMethod()
