"""Unfinished samples of an engine: what each gains, and how it ends."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from hybridrt.base.errors import EngineError, GrammarError, NoTokenLeftError
from hybridrt.engine.cache.request_log import RequestLog
from hybridrt.engine.core.fold_counts import FoldCounts
from hybridrt.engine.core.hit_audit import HitAudit
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.core.scheduler import Scheduler
from hybridrt.engine.request.intake import check_name
from hybridrt.engine.request.outputs import EngineCounters, FinishReason
from hybridrt.engine.request.sample_request import NotFinite, Request
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.runtime.step.plan import StepResult, TokenLogprobs
from hybridrt.runtime.step.token_scores import TokenScores

UNREAD = 256  # tokens that wait for text without a stream


class Samples:
    """Unfinished samples by request id. A sample that ends leaves the scheduler, and its reader is
    told.

    Attributes:
        totals: counts what samples gain and how they end.
        folds: counts the folds of steps; None for a model without state rings.
        log: gets samples that end; None: none is written.
        audit: chooses hits among them; None: none is audited.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.totals = EngineCounters()
        self.folds: FoldCounts | None = None
        self.log: RequestLog | None = None
        self.audit: HitAudit | None = None
        self._scheduler = scheduler
        self._samples: dict[str, list[Request]] = {}
        self._not_queued: set[str] = set()  # request ids; their prompts are computed elsewhere

    def __bool__(self) -> bool:
        return bool(self._samples)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is unfinished."""
        return request_id in self._samples

    def samples_of_request(self, request_id: str) -> list[Request]:
        """Unfinished samples of a request; empty if it is unknown. RequestError for an invalid id."""
        check_name(request_id)
        return self._samples.get(request_id, [])

    def all(self) -> list[Request]:
        """All unfinished samples."""
        return [request for samples in self._samples.values() for request in samples]

    def not_queued(self, request_id: str) -> bool:
        """Whether a request waits for its prompt to be computed elsewhere. RequestError for an invalid id."""
        check_name(request_id)
        return request_id in self._not_queued

    def any_queued(self) -> bool:
        """Whether the scheduler has any request."""
        return len(self._samples) > len(self._not_queued)

    def add(self, request_id: str, samples: list[Request]) -> None:
        """Enters a new request, which is not queued yet."""
        self._samples[request_id] = samples
        self._not_queued.add(request_id)

    def queue(self, request_id: str, arrived: PrefixMatch | None) -> None:
        """Gives a request to the scheduler. `arrived`: the part of its prompt that was computed
        elsewhere.
        """
        self._not_queued.remove(request_id)
        for request in self._samples[request_id]:
            request.arrived = arrived
            self._scheduler.add(request)

    def take_result(self, step: ScheduledStep, result: StepResult) -> None:
        """Gives each row of a read step what it has gained, and ends samples."""
        gains = iter(zip(result.tokens, result.logprobs, strict=True))
        if result.prompt_logprobs:
            self._score(step, result.prompt_logprobs)
        if result.pooled:
            self._pool(step, result.pooled)
        gained = []
        for request, max_new in step.rows:
            tokens, logprobs = next(gains) if max_new else ((), None)
            gained.append(len(tokens))
            if tokens and request.finish_reason is None and not request.restarting:
                self._accept(request, tokens, logprobs, max_new > 1)
            if -1 in tokens:  # even of an ended request: its state is broken
                request.broken = True
        if self.folds is not None:
            self.totals.count_folds(self.folds.of_step(step.plan, gained[: len(step.plan.decode)]))
        self._scheduler.step_consumed(step, gained)

    def _score(self, step: ScheduledStep, found: Mapping[int, TokenScores]) -> None:
        for (request, _), chunk in zip(step.rows[len(step.plan.decode) :], step.plan.extend, strict=True):
            if chunk.row in found and request.finish_reason is None:
                try:
                    request.score(chunk.computed + 1, found[chunk.row])
                except Exception as e:
                    self.fail(request, e)

    def _pool(self, step: ScheduledStep, found: Mapping[int, np.ndarray]) -> None:
        for (request, _), chunk in zip(step.rows[len(step.plan.decode) :], step.plan.extend, strict=True):
            if chunk.row in found and request.finish_reason is None:
                try:
                    request.pool(chunk.computed, found[chunk.row])
                except Exception as e:
                    self.fail(request, e)

    def fail_step(self, step: ScheduledStep, cause: BaseException) -> None:
        """Ends the samples of a step that raised."""
        for request, _ in step.rows:
            request.broken = True
            if request.finish_reason is None:
                self.fail(request, cause)
        self._scheduler.step_consumed(step, [0] * len(step.rows))

    def fail(self, request: Request, cause: BaseException) -> None:
        """Ends a sample with an error that names the cause."""
        kind = type(cause) if isinstance(cause, GrammarError | NoTokenLeftError) else EngineError
        error = kind(f"request {request.request_id!r} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._finish(request, "abort", error)

    def abort(self, request: Request) -> None:
        """Ends a sample with the reason "abort"."""
        try:
            self._finish(request, "abort")
        except Exception as e:  # its text cannot be made
            self.fail(request, e)

    def clear(self) -> None:
        """Ends all samples with an error, after a broken change. The scheduler has forgotten them."""
        for request in self.all():
            if request.finish_reason is None:
                error = EngineError(f"request {request.request_id!r} failed: an exception broke a step off")
                request.finish("abort", error)
                self.totals.count_end("abort", error)
            _notify(request)
        self._samples.clear()
        self._not_queued.clear()

    def _accept(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, verified: bool
    ) -> None:
        metrics, totals, known = request.metrics, self.totals, len(request.output)
        if metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        metrics.target_steps += 1
        totals.target_steps += 1
        if verified:
            for counters in (metrics, totals):
                counters.accepted += len(tokens) - 1
                counters.verify_steps += 1
        try:
            reason = request.append(tokens, logprobs)
            if request.suspect:
                self._scheduler.computed_anew(request)
            if reason is not None:
                self._finish(request, reason)
            else:
                self._go_on(request)
        except NotFinite as e:
            if not self._scheduler.restart(request):
                self.fail(request, EngineError(*e.args))
        except Exception as e:
            self.fail(request, e)
        totals.output_tokens += len(request.output) - known

    def _go_on(self, request: Request) -> None:
        """Makes text in parts, also without a stream: all of it at the end would delay other
        samples."""
        if request.detokenizer is not None and (request.stream or len(request.output) - request.decoded >= UNREAD):
            request.read_text()
        if request.stream:
            _notify(request)

    def _finish(self, request: Request, reason: FinishReason, error: EngineError | None = None) -> None:
        request_id = request.request_id
        request.finish(reason, error)
        self.totals.count_end(reason, error)
        if self.log is not None and not request.audits:
            self.log.note(request)
        if self.audit is not None:
            self.audit.note(request)
        if request_id not in self._not_queued:
            self._scheduler.remove(request)
        _notify(request)
        self._samples[request_id].remove(request)
        if not self._samples[request_id]:
            del self._samples[request_id]
            self._not_queued.discard(request_id)


def _notify(request: Request) -> None:
    queue = request.queue() if request.queue is not None else None
    if queue is not None:
        queue.put(request)
