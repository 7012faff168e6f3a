"""The interface of drafters, and the length that a request's drafts have earned."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.sampling.token_rules import TokenRules
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.speculative.draft import NO_DRAFT as NO_DRAFT
from hybridrt.speculative.draft import Draft as Draft


class DraftRequest(Protocol):
    """What a drafter sees of a request.

    Attributes:
        arrival: its number, unique in an engine.
        cache_key: states of one key serve no request of another.
        rules: the rules for single tokens that `params` give.
        row: row in the target's pools; None while the request does not run.
        computed: tokens with KV and state in the target.
        pending: tokens that launched steps draw and the host has not read; 0 where drafts are
            proposed.
    """

    arrival: int
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    cache_key: CacheKey
    seed: int
    rules: TokenRules | None
    row: Handle | None

    @property
    def computed(self) -> int: ...

    @property
    def pending(self) -> int: ...

    @property
    def end_page(self) -> int:
        """The target's KV pages before this one are lent to the request."""


def num_tokens(request: DraftRequest) -> int:
    """Tokens that have been read."""
    return len(request.prompt) + len(request.output)


def tokens_between(request: DraftRequest, start: int, end: int) -> list[int]:
    """The known tokens at positions max(start, 0) to end - 1, prompt first, then output."""
    start, split = max(start, 0), len(request.prompt)
    if start >= split:
        return request.output[start - split : max(end - split, 0)]
    return request.prompt[start:end] + request.output[: max(end - split, 0)]


class Drafter(ABC):
    """Proposes continuations that a decode step verifies.

    Its data of a request lives from `begin_request` to `end_request`, while the request has a row of the target.
    """

    def begin_request(self, request: DraftRequest) -> None:  # noqa: B027  (optional)
        """The request has got a row; its prompt is not computed yet. After a retraction it begins
        again."""

    def end_request(self, request: DraftRequest) -> None:  # noqa: B027  (optional)
        """The request has finished or lost its row. Ignored if it has not begun. Must not raise."""

    def after_step(self, requests: Sequence[DraftRequest], gained: Sequence[int]) -> None:  # noqa: B027  (optional)
        """A step was read. `gained`: output tokens of each request. Requests that have ended are not among them."""

    def waits(self, request: DraftRequest) -> bool:
        """Whether the next step of a request with pending tokens must wait for them, because it may
        have drafts. All rows then wait. A step that verifies drafts is always waited for."""
        return True

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        """A draft for each of these begun requests: the tokens after its last known one, at most as many as
        its number in `max_drafts` (0 or more)."""


class AdaptiveDrafter(Drafter):
    """Shortens the drafts of requests that reject them.

    A request starts with the whole length. A step that keeps no draft halves it, down to none; one
    that keeps the most possible doubles it. At none, one draft is tried every `patience` tokens; no
    step in between waits for it.

    Args:
        inner: the drafter that proposes. Drafts beyond the allowed length are cut.
        num_draft_tokens: most drafts of a step.

    Attributes:
        always: a request without a draft gets one of zeros, for a warm-up in which all steps
            verify.
    """

    def __init__(self, inner: Drafter, num_draft_tokens: int, patience: int = 16) -> None:
        self.inner, self.longest, self.patience = inner, num_draft_tokens, patience
        self.always = False
        self._earned: dict[int, int] = {}  # how long drafts may be
        self._depths: dict[int, int] = {}  # depths of the drafts whose outcome is not known yet

    def begin_request(self, request: DraftRequest) -> None:
        self._earned[request.arrival] = self.longest
        self.inner.begin_request(request)

    def end_request(self, request: DraftRequest) -> None:
        self._earned.pop(request.arrival, None)
        self._depths.pop(request.arrival, None)
        self.inner.end_request(request)

    def after_step(self, requests: Sequence[DraftRequest], gained: Sequence[int]) -> None:
        if self._depths:
            for request, tokens in zip(requests, gained, strict=True):
                depth, earned = self._depths.pop(request.arrival, 0), self._earned[request.arrival]
                if depth and tokens == 1:
                    self._earned[request.arrival] = earned // 2
                elif depth and tokens > depth:
                    self._earned[request.arrival] = min(earned * 2, self.longest)
        self.inner.after_step(requests, gained)

    def waits(self, request: DraftRequest) -> bool:
        sampled = len(request.output) + request.pending
        return (self._earned[request.arrival] > 0 or sampled % self.patience == 0) and self.inner.waits(request)

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        drafts, asked, allowed = [NO_DRAFT] * len(requests), list[int](), list[int]()
        for i, (request, most) in enumerate(zip(requests, max_drafts, strict=True)):
            earned = self._earned[request.arrival]
            if not earned and len(request.output) % self.patience == 0:
                self._earned[request.arrival] = earned = 1
            if earned and most > 0:
                asked.append(i)
                allowed.append(min(earned, most))
        for i, n, draft in zip(asked, allowed, self.inner.propose([requests[i] for i in asked], allowed)):
            drafts[i] = draft.first(n)
        if self.always:
            drafts = [d or Draft([0] * min(n, self.longest)) for d, n in zip(drafts, max_drafts, strict=True)]
        if self._depths:  # depths of drafts that no step has verified
            for request in requests:
                self._depths.pop(request.arrival, None)
        self._depths |= {r.arrival: d.depth for r, d in zip(requests, drafts) if d.tokens}
        return drafts
