"""A drafter for the executor's double."""

from collections.abc import Sequence

from hybridrt.speculative.drafter import Draft, Drafter, DraftRequest
from tests.support.mock_executor import Windows, mix, next_token


class MockDrafter(Drafter):
    """Proposes what will come, wrong from a token on that varies with the length so far; now and then waits for no
    tokens. `begun` are the requests that hold a row."""

    def __init__(self, width: int, vocab: int, windows: Windows = (None,), has_state: bool = True) -> None:
        self.width, self.vocab, self._seen = width, vocab, (windows, has_state)
        self.begun: set[int] = set()

    def begin_request(self, request: DraftRequest) -> None:
        assert request.arrival not in self.begun and request.row is not None
        self.begun.add(request.arrival)

    def end_request(self, request: DraftRequest) -> None:
        self.begun.remove(request.arrival)

    def after_step(self, requests: Sequence[DraftRequest], gained: Sequence[int]) -> None:
        assert {request.arrival for request in requests} <= self.begun and 0 not in gained

    def waits(self, request: DraftRequest) -> bool:
        return (len(request.output) + request.pending) // 5 % 2 == 0

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        assert {request.arrival for request in requests} <= self.begun
        return [
            Draft(self.drafts(request, min(n, self.width))) for request, n in zip(requests, max_drafts, strict=True)
        ]

    def drafts(self, request: DraftRequest, most: int) -> list[int]:
        assert not request.pending, "drafts follow a token that has been read"
        context = [*request.prompt, *request.output]
        right = mix(len(context), request.seed) % (self.width + 2)
        for i in range(most):
            token = next_token(context, request.seed, len(request.output) + i, self.vocab, *self._seen)
            context.append(token if i < right else (token + 1) % self.vocab)
        return context[len(context) - most :] if most else []
