"""Chooses the requests and tokens of the next step, by host integers alone. It waits for the device only where a
drafter runs a model (`Drafter.propose`)."""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from typing import Protocol

import numpy as np

from hybridrt.base.spans import mrope_positions
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.draft_rows import needs_tokens, propose_drafts
from hybridrt.engine.core.encoder_tasks import EncoderTasks
from hybridrt.engine.core.prompt_waiters import Place, PromptWaiters
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.request.sample_request import Request, RowColumns
from hybridrt.kernels.core.slots import OWN_SLOT
from hybridrt.runtime.step.plan import DecodeRows, ExtendRow, StateCopy, StepPlan, int32s
from hybridrt.speculative.draft import NO_DRAFT, Draft, draft_columns
from hybridrt.speculative.drafter import Drafter

AUDIT_CHUNK = 128  # tokens of a chunk of an audit: a request that arrives may wait for the step
AGE_SECONDS = 30.0  # a request that waits so much longer goes before one of the next priority
# Prompts that a step with decode rows admits without a token of them, such as those that begin with an image: an
# admission takes the host half a millisecond, and no budget of tokens bounds these.
IDLE_ADMISSIONS = 2


class WaitingRequests(Protocol):
    """Requests that may be started, in their present order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def remove(self, request: Request, /) -> None: ...
    def clear(self) -> None: ...


def most_idle(decode: DecodeRows) -> int | float:
    """Prompts that a step may admit without a token of them."""
    return IDLE_ADMISSIONS if len(decode.rows) else float("inf")


def goes_first_from(request: Request) -> float:
    """Orders requests of different priorities by age: the lower number goes first."""
    return request.metrics.arrival_time + AGE_SECONDS * request.params.priority


def _first_come_key(request: Request) -> tuple[float, int]:
    return goes_first_from(request), request.arrival


def _priority_key(request: Request) -> tuple[int, int]:
    """Orders running requests: the last one is retracted first."""
    return request.params.priority, request.arrival


class Scheduler:
    """Continuous batching with chunked prefill: by priority, which ages, then first come, first served.
    `PolicyScheduler` has another order.

    Every step includes all running requests that can decode. Prefill gets the rest of
    `chunked_prefill_size`, but never less than half of `chunked_prefill_size`. A
    request is admitted when a row, a slot and the pages of all its tokens are free, with a page to
    spare for each running request. If a decode row finds no page, and no launched step may still
    free one, the latest arrival of the last priority is retracted: it returns to the queue, and its
    output becomes part of its prefill.

    Args:
        coordinator: lends rows, slots and pages.
        chunked_prefill_size: as EngineConfig has it.
        drafter: proposes drafts; a step then waits for the tokens that they follow, and all rows
            decode together.
        encoder: plans the tasks of an encoder; None: requests have no spans.

    Attributes:
        queues: waiting requests that may be started.
    """

    def __init__(
        self,
        coordinator: CacheCoordinator,
        chunked_prefill_size: int,
        drafter: Drafter | None = None,
        encoder: EncoderTasks | None = None,
    ) -> None:
        self.encoder = encoder
        self._first_come: list[Request] = []  # in order
        self.queues: WaitingRequests = self._first_come
        self.running: dict[int, Request] = {}  # requests by arrival, in order of admission
        self.num_retractions = 0
        self._coordinator = coordinator
        self._chunk = chunked_prefill_size
        self._drafter = drafter
        self._waiters = PromptWaiters(coordinator.prefixes)
        # Requests that are queued again when the next step is made, or once their prefix has been fetched.
        self._aside: list[Request] = []
        self._in_flight = 0
        self._order: tuple[list[Request], np.ndarray] | None = None
        self._constrained = False
        self._blocked: tuple[int, ...] = ()  # the request, and the room stamp then

    @property
    def num_waiting(self) -> int:
        return len(self.queues) + len(self._aside) + len(self._waiters)

    @property
    def waiting(self) -> Iterator[Request]:
        """Those that wait for a prefix from main memory, then others in their present order, then
        those that wait for a prompt.
        """
        return chain(self._aside, self.queues, self._waiters)

    def add(self, request: Request) -> None:
        self._queue(request, self._coordinator.prefixes.expect(request))

    def _queue(self, request: Request, known: int) -> None:
        """`known`: its tokens that are cached."""
        if (place := self._place_for(request)) is not None:
            self._waiters.hold(request, place)
        else:
            insort(self._first_come, request, key=_first_come_key)

    def _place_for(self, request: Request) -> Place | None:
        """Where a request should wait for the first sample of the same prompt. None: it should not."""
        return None if request.leader is None else self._waiters.place_for(request)

    def schedule(self) -> ScheduledStep | None:
        """The next step, counted as launched from now on; None if nothing can run before a launched
        step ends.
        """
        if self._coordinator.fetches is not None:
            self._coordinator.advance_fetches(self.waiting, len(self.running))
        if self._aside:
            self._queue_again()
        step = ScheduledStep()
        prefilling = self._schedule_running(step) if self.running else []
        if prefilling is None:
            return None
        if prefilling or self.queues:
            self._schedule_prefill(step, prefilling)
        if not self._coordinator.seal(step.plan, step.rows) and not step.rows:
            return None
        if self._constrained:
            sampling = (request for request, max_new in step.rows if max_new)
            step.plan.constrained = [i for i, request in enumerate(sampling) if request.matcher is not None]
        self._in_flight += 1
        for request, _ in step.rows:
            request.in_flight += 1
        return step

    def _schedule_running(self, step: ScheduledStep) -> list[Request] | None:
        """Adds the decode rows. Returns the running requests with uncomputed prompts. None: no step can be made
        before a launched one was read."""
        requests, rows = self._running_rows()
        columns = self._coordinator.columns.select_rows(rows)
        prefilled = columns.computed >= columns.prefill_end
        ready = prefilled & (columns.output_index < columns.max_output)
        if self._drafter is not None:
            waiting = needs_tokens(self._drafter, requests, columns, ready)
            # All rows decode together: else those that wait and the others would take steps in turns.
            if waiting.any() and not waiting[ready].all():
                return None
            ready &= ~waiting
        indices, prefilling = ready.nonzero()[0], list[Request]()
        if len(indices) < len(rows):
            prefilling = list(compress(requests, (~prefilled).tolist()))
            requests = [requests[i] for i in indices.tolist()]
            rows, columns = rows[indices], columns.select_rows(indices)
        if len(indices):
            self._schedule_decode(step, requests, rows, columns)
        return prefilling

    def step_consumed(self, step: ScheduledStep, gained: Sequence[int]) -> None:
        """Call after reading a launched step. `gained`: tokens of each row. Releases finished
        requests that no other launched step names.
        """
        self._in_flight -= 1
        decode, extend = step.plan.decode, step.plan.extend
        if sum(gained) < step.max_new_tokens:
            lost = [max_new - tokens for (_, max_new), tokens in zip(step.rows, gained, strict=True)]
            rows = np.array([*decode.rows.tolist(), *(row.row for row in extend)], np.int64)
            self._coordinator.columns.take_back(rows, int32s(lost))
        computed = [*gained[: len(decode.rows)], *(len(row.tokens) for row in extend)] if extend else gained
        for (request, _), new in zip(step.rows, computed, strict=True):
            request.in_flight -= 1
            if request.restarting and request.finish_reason is None:
                self._wait_again(request)
            elif request.finish_reason is None:
                self._coordinator.settle(request, new)
            elif not request.in_flight:
                self._coordinator.release(request)
        for request, _ in step.rows[-len(extend) :] if extend else ():
            if request.is_source:
                self._release_waiters(request)
        if self._drafter is not None:
            moved = [i for i, (r, max_new) in enumerate(step.rows) if max_new and r.arrival in self.running]
            self._drafter.after_step([step.rows[i][0] for i in moved], [gained[i] for i in moved])

    def remove(self, request: Request) -> None:
        """Removes a finished request from the queues. Releases it now, or in `step_consumed` once no
        launched step names it.
        """
        if request.row is None:
            self._remove_waiting(request)
            return
        if not request.restarting:
            self._stop_running(request)
        if not request.in_flight:
            self._coordinator.release(request)

    def restart(self, request: Request) -> bool:
        """Makes a running request whose logits are not finite compute everything again, without the
        cached prefix that it started from. No request may use that prefix again. False, with nothing
        changed, if there was none.
        """
        length = request.prefix.length
        if not length or request.afresh:
            return False
        self._stop_running(request)
        request.afresh = request.restarting = True
        request.suspect = length
        self._coordinator.drop_prefix(request, length, whole=False)
        self._coordinator.prefixes.counts.dropped += 1
        return True

    def _wait_again(self, request: Request) -> None:
        """Queues a request that `restart` has stopped, once no launched step names it. It offers nothing to
        the cache."""
        if not request.in_flight:
            request.broken = True
            self._coordinator.release(request)
            request.broken = request.restarting = False
            self.add(request)

    def computed_anew(self, request: Request) -> None:
        """Call when a restarted request has finite logits without its cached prefix: all entries of the
        prefix may be wrong, so they are dropped.
        """
        length, request.suspect = request.suspect, 0
        self._coordinator.drop_prefix(request, length, whole=True)

    def _remove_waiting(self, request: Request) -> None:
        if request in self._waiters:
            self._waiters.drop(request)
        elif request in self._aside:
            self._aside.remove(request)
        else:
            self.queues.remove(request)
        self._coordinator.prefixes.forget(request)
        if self._coordinator.fetches is not None:
            self._coordinator.fetches.cancel(request.arrival)
        self._aside += self._waiters.end_source(request)

    def _release_waiters(self, source: Request) -> None:
        """A step of `source` was consumed. Queues the requests that waited for its prompt and can start now."""
        if source.finish_reason is None and source.row is not None:
            waiters = self._waiters
            self._aside += waiters.end_source(source) if source.shared else waiters.release_ready(source)

    def _queue_again(self) -> None:
        again, self._aside = self._aside, []
        for request in again:
            if self._coordinator.waits(request):
                self._aside.append(request)
            else:
                self._queue(request, self._coordinator.prefixes.match(request).length)

    def failed(self) -> None:
        """Call after a launch has failed: forgets embeddings, because it is unknown which encoder tasks run."""
        if self.encoder is not None:
            self.encoder.clear()

    def clear(self) -> None:
        self.failed()
        self.queues.clear()
        self._waiters.clear()
        self._aside.clear()
        self._in_flight, self._order = 0, None
        for request in list(self.running.values()):
            self._stop_running(request)

    def _stop_running(self, request: Request) -> None:
        del self.running[request.arrival]
        self._order = None
        if request.spans and self.encoder is not None:
            self.encoder.forget(request)
        if request.is_source and not request.shared:
            self._aside += self._waiters.end_source(request)
        if self._drafter is not None:
            self._drafter.end_request(request)

    def _running_rows(self) -> tuple[list[Request], np.ndarray]:
        """Requests in order of admission, and their rows [n] int64 (numpy indexes fastest with it).
        Cached until `running` changes."""
        if self._order is None:
            requests = list(self.running.values())
            self._order = requests, np.array([r.row.index for r in requests], np.int64)  # type: ignore[union-attr]
            self._constrained = any([request.matcher is not None for request in requests])
        return self._order

    def _schedule_decode(
        self, step: ScheduledStep, requests: list[Request], rows: np.ndarray, columns: RowColumns
    ) -> None:
        """Rows without a page are left out. All requests must be able to decode."""
        drafts = [] if self._drafter is None else propose_drafts(self._drafter, requests, columns)
        ends = columns.computed + int32s([len(draft.tokens) for draft in drafts]) if drafts else columns.computed
        short = (ends >= columns.capacity).nonzero()[0].tolist()
        if short:
            found = self._find_pages(requests, drafts, short, step.plan)
            rows, requests, columns = rows[found], [requests[i] for i in found], columns.select_rows(found)
            drafts = [drafts[i] for i in found] if drafts else []
        columns_of_rows = rows.astype(np.int32), columns.computed, columns.output_index
        if drafts:
            step.plan.decode = DecodeRows.with_drafts(*columns_of_rows, *draft_columns(drafts))
            for request, draft in zip(requests, drafts, strict=True):
                request.metrics.proposed += len(draft)
            gains = step.plan.decode.num_drafts + 1
            self._coordinator.columns.advance(rows, columns, gains)
            step.rows = list(zip(requests, gains.tolist(), strict=True))
        else:
            step.plan.decode = DecodeRows(*columns_of_rows, np.zeros(len(rows), np.int32))
            self._coordinator.columns.advance(rows, columns, 1)
            step.rows = list(zip(requests, repeat(1)))
        step.max_new_tokens = len(rows) + len(step.plan.decode.drafts)

    def _find_pages(
        self, requests: Sequence[Request], drafts: list[Draft], short: Iterable[int], plan: StepPlan
    ) -> list[int]:
        """Lends pages to the requests at `short`; drops drafts that get none. Returns the places of
        the requests that have a page."""
        lacking = set[int]()
        for i in short:
            request = requests[i]
            if request.row is None:
                continue  # retracted for an earlier one
            if drafts and not self._coordinator.grow(request, request.computed + 1 + len(drafts[i]), plan):
                drafts[i] = NO_DRAFT
            if not self._grow(request, plan):
                lacking.add(i)
        return [i for i, request in enumerate(requests) if i not in lacking and request.row is not None]

    def _grow(self, request: Request, plan: StepPlan) -> bool:
        while not self._coordinator.grow(request, request.computed + 1, plan):
            if self._in_flight:
                return False  # a launched step may free pages
            retracted = self._retract_latest(plan)
            if retracted is request:
                return False
        return True

    def _retract_latest(self, plan: StepPlan) -> Request:
        victim = max(self.running.values(), key=_priority_key)
        assert victim.row is not None
        # Its row may be lent again.
        plan.page_writes = [write for write in plan.page_writes if write.row != victim.row.index]
        self._stop_running(victim)
        self._coordinator.release(victim)
        victim.metrics.retractions += 1
        self.num_retractions += 1
        self.add(victim)
        return victim

    def _most_tokens(self, decode: DecodeRows) -> int:
        """Prompt tokens that a step may get next to these rows."""
        return max(self._chunk - len(decode.rows) - len(decode.drafts), (self._chunk + 1) // 2)

    def _schedule_prefill(self, step: ScheduledStep, prefilling: Iterable[Request]) -> None:
        """Also admits waiting requests, unless a decode row found no page: then none is free."""
        if self.encoder is not None:
            self.encoder.begin_step()
        left, waiting, idle = self._most_tokens(step.plan.decode), self._first_come, 0
        for request in prefilling:
            if left and request.row is not None:  # others were just retracted
                left -= self._add_extend(step, request, left)
        while left and waiting and idle < most_idle(step.plan.decode):
            request = waiting[0]
            if self._waits_for_others(request):
                continue
            if not self._admit(request, step.plan):
                return
            left -= (tokens := self._add_extend(step, request, left))
            idle += not tokens

    def _waits_for_others(self, request: Request) -> bool:
        """Takes a request that should wait for another prompt, or for main memory, out of the queue. False
        if it should not."""
        if (place := self._place_for(request)) is not None:
            self.queues.remove(request)
            self._waiters.hold(request, place)
            return True
        if self._coordinator.waits(request):
            self.queues.remove(request)
            self._aside.append(request)
            return True
        return False

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Admits a waiting request. False: it, and others, must wait."""
        stamp = request.arrival, len(self.running), *self._coordinator.room_stamp()
        if self._blocked == stamp or not self._coordinator.admit_request(request, len(self.running), plan):
            self._blocked = stamp  # until something changes
            return False
        self.queues.remove(request)
        self._coordinator.prefixes.forget(request)
        self.running[request.arrival], self._order = request, None
        self._constrained |= request.matcher is not None
        if self._drafter is not None:
            self._drafter.begin_request(request)
        return True

    def _add_extend(self, step: ScheduledStep, request: Request, most: int) -> int:
        """Adds a chunk of at most so many tokens of an admitted request. Returns its tokens; 0 if none
        of them has a page."""
        assert request.row is not None
        start = request.computed
        end = min(start + (min(most, AUDIT_CHUNK) if request.audits else most), request.prefill_end)
        if request.spans and self.encoder is not None:
            end = self.encoder.end_for_spans(request, start, end, step.plan)
        end = self._coordinator.prefixes.end_for_states(request, start, end)
        end = self._coordinator.use_spare_pages(request, end, step.plan)
        if end <= start:
            return 0
        tokens, row, columns = request.tokens, request.row.index, self._coordinator.columns
        last = end == request.prefill_end
        columns.computed[row] = end
        columns.output_index[row] += last
        following = 0 if last else tokens[end]
        state = request.prefix.state
        read_state_slot = state.index if state is not None and start == request.prefix.length else OWN_SLOT
        saves = self._coordinator.prefixes.save(request, start, end)
        embeddings = mrope = None
        if request.spans and self.encoder is not None:
            embeddings = self.encoder.take_rows(request, start, end, step.plan)
            mrope = mrope_positions(request.spans, start, end) if self.encoder.mrope else None
        step.plan.extend.append(
            ExtendRow(
                row, start, tokens[start:end], len(request.output), last, following, read_state_slot, saves, embeddings,
                mrope,
            )
        )  # fmt: skip
        step.rows.append((request, int(last)))
        step.max_new_tokens += last
        if last and request.export_to is not None:
            room = request.export_to
            step.plan.exports.append(StateCopy(row, end, room.start, len(room), request.export_from))
        return end - start
