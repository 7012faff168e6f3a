"""Makes the bitmasks of a launched step, once the host has read the tokens of the steps before it."""

from collections.abc import Callable

import numpy as np

from hybridrt.engine.grammar import MaskedRow, fill_masks
from hybridrt.engine.grammar_compiler import GrammarCompiler
from hybridrt.engine.request import Request
from hybridrt.engine.scheduler import ScheduledStep
from hybridrt.errors import GrammarError
from hybridrt.runtime.step import DecodeRows
from hybridrt.speculative.drafter import NO_DRAFT, Draft


def step_masks(
    step: ScheduledStep, compiler: GrammarCompiler, fail: Callable[[Request, Exception], None]
) -> np.ndarray:
    """Masks as `Executor.sample` takes them. Calls `fail` for a request whose grammar cannot be followed any further.
    Rows of ended requests may sample any token: it is dropped."""
    decode, sampling = step.plan.decode, [request for request, max_new in step.rows if max_new]
    ends = np.cumsum(decode.num_drafts)
    rows, requests = [], []
    for i in step.plan.constrained:
        request = sampling[i]
        draft = _draft(decode, i, int(ends[i])) if i < len(decode) else NO_DRAFT
        rows.append(MaskedRow(request.matcher if request.finish_reason is None else None, draft))
        requests.append(request)
    masks = fill_masks(rows, compiler.words, compiler.executor)
    for request, row in zip(requests, rows, strict=True):
        try:
            if row.matcher is not None:
                row.matcher.check()
        except GrammarError as e:
            fail(request, e)
    return masks


def _draft(decode: DecodeRows, i: int, end: int) -> Draft:
    """The draft of decode row i, which ends at `end` among all drafts."""
    start = end - int(decode.num_drafts[i])
    parents = range(end - start) if decode.parents is None else decode.parents[start:end].tolist()
    return Draft.of_tree(decode.drafts[start:end].tolist(), parents)
