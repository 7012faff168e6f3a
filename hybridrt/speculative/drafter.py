"""The protocol of drafters, and the length that a request's drafts have earned."""

from collections.abc import Sequence
from typing import Protocol

from hybridrt.sampling_params import SamplingParams


class DraftRequest(Protocol):
    """What a drafter sees of a request; its identity is the object's."""

    prompt: list[int]
    output: list[int]
    params: SamplingParams
    seed: int

    @property
    def finish_reason(self) -> str | None:
        """None while the request runs."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Prompt, then output."""
        ...


class Drafter(Protocol):
    """Guesses continuations that a decode step verifies."""

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[list[int]]:
        """For each request at most `most` tokens (0 or more) to follow its last known one."""
        ...


class AdaptiveDrafter:
    """Stops paying for drafts that keep failing.

    A request starts with the whole length. A step that keeps no draft halves it, down to none; one that keeps all of
    them doubles it. At none, every `patience` tokens one draft is tried again.

    Args:
        inner: who proposes.
        num_draft_tokens: most drafts of a step.
    """

    def __init__(self, inner: Drafter, num_draft_tokens: int, patience: int = 16) -> None:
        self.inner, self.longest, self.patience = inner, num_draft_tokens, patience
        self._lengths: dict[int, tuple[DraftRequest, int, int, int]] = {}

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[list[int]]:
        self._forget_finished()
        allowed = [min(n, self._length(r)) for r, n in zip(requests, most)]
        asked = [i for i, n in enumerate(allowed) if n > 0]
        drafts: list[list[int]] = [[] for _ in requests]
        for i, tokens in zip(asked, self.inner.propose([requests[i] for i in asked], [allowed[i] for i in asked])):
            drafts[i] = tokens[: allowed[i]]
        for request, tokens in zip(requests, drafts):
            self._lengths[id(request)] = (request, self._length(request), len(request.output), len(tokens))
        return drafts

    def _length(self, request: DraftRequest) -> int:
        """The length that the last step's outcome leaves."""
        _, length, known, proposed = self._lengths.get(id(request), (request, self.longest, len(request.output), 0))
        gained = len(request.output) - known
        if proposed and gained:
            kept = gained - 1
            length = length // 2 if kept == 0 else min(length * 2, self.longest) if kept >= proposed else length
        if length == 0 and len(request.output) % self.patience == 0:
            return 1
        return length

    def _forget_finished(self) -> None:
        done = [key for key, (request, *_) in self._lengths.items() if request.finish_reason is not None]
        for key in done:
            del self._lengths[key]
