"""Which running requests wait for their last tokens, and which drafts the others verify."""

from collections.abc import Sequence

import numpy as np

from hybridrt.engine.request.sample_request import Request, RowColumns
from hybridrt.runtime.step.plan import int32s
from hybridrt.speculative.draft import NO_DRAFT, Draft
from hybridrt.speculative.drafter import Drafter


def needs_tokens(drafter: Drafter, requests: Sequence[Request], columns: RowColumns, ready: np.ndarray) -> np.ndarray:
    """[n] bool: of the `ready` rows, those whose next step follows tokens that the host must read
    first."""
    pending = _pending(requests, columns)
    found = ready & (pending > 0)
    for i in found.nonzero()[0].tolist():
        request = requests[i]
        # After a verify step the next position is unknown.
        found[i] = pending[i] > request.in_flight or drafter.waits(request)
    return found


def propose_drafts(drafter: Drafter, requests: Sequence[Request], columns: RowColumns) -> list[Draft]:
    """A draft for each request, empty while tokens are pending; [] if all are empty. No draft goes
    past the end of its request: the state would serve no other request.
    """
    known = (_pending(requests, columns) == 0).nonzero()[0]
    max_drafts, asked = columns.max_output - columns.output_index - 1, [requests[i] for i in known.tolist()]
    if not asked:
        return []
    drafts = [NO_DRAFT] * len(requests)
    proposed = drafter.propose(asked, max_drafts[known].tolist())
    for i, request, draft in zip(known.tolist(), asked, proposed, strict=True):
        if draft.tokens:
            draft = draft.until(request.ends_within)
            drafts[i] = draft if request.matcher is None else request.matcher.allowed(draft)
    return drafts if any(draft.tokens for draft in drafts) else []


def _pending(requests: Sequence[Request], columns: RowColumns) -> np.ndarray:
    return columns.output_index - int32s([len(request.output) for request in requests])
