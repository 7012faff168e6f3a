"""Prompt lookup: proposes what followed an earlier occurrence of the last tokens (Saxena 2023)."""

from array import array
from collections.abc import Collection, Sequence
from itertools import takewhile

from hybridrt.runtime.load.draft_needs import DraftTarget, Everywhere
from hybridrt.speculative.draft import Draft, merge
from hybridrt.speculative.drafter import Drafter, DraftRequest, num_tokens, tokens_between
from hybridrt.speculative.method import DraftMethod

TOKENS_A_STEP = 512  # that all requests together add to their indices: 7 microseconds each, for which all rows wait
_OF_EACH = 32  # that each request may add: more than a step gains


class _Ngrams:
    """Where each n-gram of one size ended in a request's text: the next token's position; 0 for
    none. Hashes are compared: a collision only makes a draft fail.
    """

    def __init__(self, size: int, excluded: Collection[int] = ()) -> None:
        self.size, self._excluded = size, frozenset(excluded)
        self._latest: dict[int, int] = {}  # end by hash
        self.earlier = array("i")  # for each n-gram in order, the end of its earlier occurrence

    def extend(self, text: Sequence[int], start: int) -> None:
        """`text` begins at position `start`, not after the first unknown n-gram."""
        latest, earlier = self._latest, self.earlier
        new = text[len(earlier) - start :]
        ngrams = zip(*[new[i:] for i in range(self.size)])
        held = {token for token in self._excluded if token in new}
        for end, ngram in enumerate(ngrams, len(earlier) + self.size):
            if held and not held.isdisjoint(ngram):
                earlier.append(0)
                continue
            earlier.append(latest.get(key := hash(ngram), 0))
            latest[key] = end

    def matches(self, count: int) -> list[int]:
        """Finds earlier occurrences of the last n-gram, the latest first."""
        found: list[int] = []
        end = self.earlier[-1] if self.earlier else 0
        while end and len(found) < count:
            found.append(end)
            end = self.earlier[end - self.size]
        return found


class NgramDrafter(Drafter):
    """Looks up the last `longest` tokens in the request's own text, then fewer, down to `shortest`.

    Each request has an index of its n-grams, so a proposal costs time for new tokens only. A long
    prompt is added to it over several steps, and nothing is proposed before.

    Args:
        topk: matches to propose together: the latest ones of the longest n-gram first.
        excluded: placeholders of images, which are neither looked up nor proposed.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, topk: int = 1, excluded: Collection[int] = ()) -> None:
        self.longest, self.shortest, self.topk, self.excluded = longest, shortest, topk, frozenset(excluded)
        self._indices: dict[int, list[_Ngrams]] = {}

    def begin_request(self, request: DraftRequest) -> None:
        sizes = range(self.longest, self.shortest - 1, -1)
        self._indices[request.arrival] = [_Ngrams(size, self.excluded) for size in sizes]

    def end_request(self, request: DraftRequest) -> None:
        self._indices.pop(request.arrival, None)

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        left, drafts = TOKENS_A_STEP, list[Draft]()
        for request, n in zip(requests, max_drafts, strict=True):
            added = self._extend(request, max(left, _OF_EACH))
            left -= added
            drafts.append(merge([self._continue(request, after, n) for after in self._matches(request)], n))
        return drafts

    def _extend(self, request: DraftRequest, most: int) -> int:
        """Adds at most so many tokens to a request's index. Returns how many it has added."""
        index, total = self._indices[request.arrival], num_tokens(request)
        start = len(index[0].earlier)  # the longest reach back furthest
        known = start + self.longest - 1 if start else 0
        end = min(total, known + most)
        text = tokens_between(request, start, end)
        for ngrams in index:
            ngrams.extend(text, start)
        return end - known

    def _matches(self, request: DraftRequest) -> list[int]:
        """Finds at most `topk` earlier occurrences of the text's end; none while its index is not complete."""
        index, found = self._indices[request.arrival], list[int]()
        if len(index[-1].earlier) + self.shortest - 1 < num_tokens(request):
            return found
        for ngrams in index:
            found += [end for end in ngrams.matches(self.topk) if end not in found]
        return found[: self.topk]

    def _continue(self, request: DraftRequest, after: int, max_drafts: int) -> list[int]:
        """A match that reaches the text's end continues with its own predictions."""
        drafts = tokens_between(request, after, after + max_drafts)
        period = num_tokens(request) - after
        while len(drafts) < max_drafts:
            drafts.append(drafts[-period])
        return list(takewhile(lambda token: token not in self.excluded, drafts)) if self.excluded else drafts


class NgramMethod(DraftMethod):
    """Drafts by prompt lookup."""

    def drafter(self, runner: DraftTarget, everywhere: Everywhere) -> Drafter:
        assert runner.config.speculative is not None
        return NgramDrafter(topk=runner.config.speculative.topk, excluded=runner.model_config.image_tokens.keys())


METHOD = NgramMethod()
