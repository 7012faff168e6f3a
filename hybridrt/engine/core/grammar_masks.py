"""Bitmasks of a launched step, made once the host has read the steps before it."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hybridrt.base.errors import GrammarError
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.mask_time import STEP_SECONDS, WATCH_SECONDS, thread_seconds
from hybridrt.engine.grammar.matcher import MaskedRow, Matcher
from hybridrt.engine.request.sample_request import Request
from hybridrt.runtime.step.plan import DecodeRows
from hybridrt.speculative.draft import NO_DRAFT, Draft

if TYPE_CHECKING:
    from llguidance import LLExecutor

_SLICE = 32


def step_masks(
    step: ScheduledStep, compiler: GrammarCompiler, fail: Callable[[Request, Exception], None]
) -> np.ndarray:
    """Masks for `StepHandle.sample`. Calls `fail` for a request whose grammar cannot be followed
    further. Rows of ended requests may sample any token: it is dropped.
    """
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
                row.matcher.check_limits()
        except GrammarError as e:
            fail(request, e)
    return masks


def _draft(decode: DecodeRows, i: int, end: int) -> Draft:
    start = end - int(decode.num_drafts[i])
    predecessors = None if decode.predecessors is None else decode.predecessors[start:end]
    return Draft.from_columns(decode.drafts[start:end], predecessors)


_Place = tuple[Matcher, Draft, int]  # a draft, and its first mask


def fill_masks(rows: Sequence[MaskedRow], words: int, executor: "LLExecutor") -> np.ndarray:
    """[sum(1 + len(draft)), words] int32; bit i % 32 of word i // 32 is set if token i may follow.

    Several threads make masks together while they need little time. Else each row is measured, and
    a request over its limit fails (`Matcher.check_limits`): its masks then allow all tokens.
    """
    starts = [0, *accumulate(1 + len(row.draft) for row in rows)]
    masks = np.full((starts[-1], words), -1, np.int32)
    live = [(row.matcher, row.draft, start) for row, start in zip(rows, starts) if row.matcher is not None]
    watched = [place for place in live if place[0].allowance.watched]
    _fill_together([place for place in live if not place[0].allowance.watched], masks, executor)
    _fill_measured(watched, masks)
    return masks


def _fill_together(places: Sequence[_Place], masks: np.ndarray, executor: "LLExecutor") -> None:
    """A thread gets neighbours of one root: two would wait for its lexer. If masks take too long,
    times each of the remaining rows, and all rows of the next step."""
    ordered = sorted(places, key=lambda place: place[0].root)
    slices = -(-len(ordered) // _SLICE)
    began = time.monotonic()
    for i in range(slices):
        _fill_slice(ordered[i::slices], masks, executor)
        if time.monotonic() - began > WATCH_SECONDS:
            for matcher, _, _ in ordered:
                matcher.allowance.watch()
            _fill_measured([place for j in range(i + 1, slices) for place in ordered[j::slices]], masks)
            return


def _fill_slice(places: Sequence[_Place], masks: np.ndarray, executor: "LLExecutor") -> None:
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    plain, drafted = [], []
    for matcher, draft, start in places:
        if not (draft.is_chain and matcher.plain):
            matcher.fill_masks(draft, masks[start : start + 1 + len(draft)])
        elif len(draft):
            drafted.append((matcher.inner, start, list(draft.tokens)))
        else:
            plain.append((matcher.inner, start))
    if plain:
        fill_next_token_bitmask_par(executor, plain, masks)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, masks)


def _fill_measured(places: Sequence[_Place], masks: np.ndarray) -> None:
    """Light requests come first. A heavy one fails if the step's time is over."""
    spent = 0.0
    for matcher, draft, start in sorted(places, key=lambda place: place[0].allowance.last):
        if matcher.allowance.heavy and spent > STEP_SECONDS:
            matcher.allowance.fail(f"more than {1000 * STEP_SECONDS:g} ms of CPU time a step, with others of its kind")
            continue
        with thread_seconds() as taken:
            matcher.fill_masks(draft, masks[start : start + 1 + len(draft)])
        matcher.allowance.masked(taken[0], 1 + len(draft))
        if matcher.allowance.heavy:
            spent += taken[0]
