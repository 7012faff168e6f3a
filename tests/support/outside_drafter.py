"""A method of drafting as another package brings it: it proposes what followed the last token the first time."""

from collections.abc import Sequence
from itertools import pairwise

from hybridrt.base.engine_config import EngineConfig
from hybridrt.runtime.load.draft_needs import Everywhere
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.speculative.drafter import Draft, Drafter, DraftRequest, num_tokens, tokens_between
from hybridrt.speculative.method import DraftMethod


class FirstFollowers(Drafter):
    """Of each request: the token that followed each token first."""

    def __init__(self) -> None:
        self.followers: dict[int, dict[int, int]] = {}
        self.known: dict[int, int] = {}

    def begin_request(self, request: DraftRequest) -> None:
        self.followers[request.arrival], self.known[request.arrival] = {}, 1

    def end_request(self, request: DraftRequest) -> None:
        self.followers.pop(request.arrival, None)
        self.known.pop(request.arrival, None)

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        return [Draft(self._chain(request, n)) for request, n in zip(requests, max_drafts, strict=True)]

    def _chain(self, request: DraftRequest, max_drafts: int) -> list[int]:
        followers, known = self.followers[request.arrival], num_tokens(request)
        new = tokens_between(request, self.known[request.arrival] - 1, known)
        for before, token in pairwise(new):
            followers.setdefault(before, token)
        self.known[request.arrival] = known
        chain = new[-1:]
        while len(chain) <= max_drafts and chain[-1] in followers:
            chain.append(followers[chain[-1]])
        return chain[1:]


class FirstFollowersMethod(DraftMethod):
    """On the host. Its row takes some bytes, so that a test can check that they are charged."""

    def row_bytes(self, config: EngineConfig, target: RunTarget, max_len: int) -> int:
        return max_len

    def fixed_bytes(self, config: EngineConfig, target: RunTarget) -> int:
        return 5000

    def drafter(self, runner: ModelRunner, everywhere: Everywhere) -> Drafter:
        return FirstFollowers()


OUTSIDE = FirstFollowersMethod()
