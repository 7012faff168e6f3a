"""The target's own multi-token-prediction head as drafter. Its states and KV belong to the target's rows and pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.runtime.mtp import DraftRow
from hybridrt.runtime.step import StepHandle
from hybridrt.speculative.drafter import Draft, DraftRequest
from hybridrt.speculative.tree import with_siblings


@dataclass(frozen=True)
class DraftTask:
    """Has a runner's prediction head draft `steps` places (MTPRunner.draft): what every rank is told to do."""

    rows: Sequence[DraftRow]
    steps: int
    topk: int

    def __call__(self, runner: ModelRunner) -> StepHandle:
        assert runner.mtp is not None, 'a runner with method "mtp" has a head'
        return runner.mtp.draft(self.rows, self.steps, self.topk)


Everywhere = Callable[[DraftTask], StepHandle]


class MTPDrafter:
    """Draws a chain from the head; with topk > 1 one place of it for every topk drafts, and the likeliest other tokens
    beside it.

    Args:
        everywhere: calls a task with the runner of every rank; what the first one's call returns.
        num_draft_tokens: most drafts of a request: so far do its KV pages for drafts reach.
    """

    def __init__(self, everywhere: Everywhere, num_draft_tokens: int, topk: int = 1) -> None:
        self.everywhere, self.longest, self.topk = everywhere, num_draft_tokens, topk

    def propose(self, requests: Sequence[DraftRequest], most: Sequence[int]) -> list[Draft]:
        most = [min(n, self.longest) for n in most]
        steps = -(-max(most, default=0) // self.topk)
        if not steps:
            return [Draft() for _ in requests]
        drawn = self.everywhere(DraftTask([_row(request) for request in requests], steps, self.topk)).result()
        return [self._draft(tokens, n) for tokens, n in zip(drawn.tokens, most, strict=True)]

    def _draft(self, tokens: Sequence[int], most: int) -> Draft:
        """At most `most` tokens of the places that were drawn for a request: each its draft, then the likeliest."""
        width = 1 + self.topk
        places = [tokens[i : i + width] for i in range(0, len(tokens), width)][: -(-most // self.topk)]
        siblings = [[t for t in likely if t != drawn][: self.topk - 1] for drawn, *likely in places]
        # A draw of -1, from logits that are not finite, is no token: any other will do as a draft.
        return with_siblings([max(drawn, 0) for drawn, *_ in places], siblings, most)


def _row(request: DraftRequest) -> DraftRow:
    assert request.row is not None, "only running requests are drafted for"
    return DraftRow(request.row.index, request.computed, request.end_page, len(request.output), request.params)
