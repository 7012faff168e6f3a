"""The scheduler of an engine with a target for the time between tokens (`TrafficPolicy`)."""

from collections.abc import Iterable, Sequence

import msgspec

from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.client_queues import ClientQueues, PromptOrder
from hybridrt.engine.core.encoder_tasks import EncoderTasks
from hybridrt.engine.core.prompt_waiters import Place
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.core.scheduler import Scheduler, most_idle
from hybridrt.engine.core.step_cost import PromptWork, StepWork
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.sample_request import Request
from hybridrt.runtime.step.plan import StepPlan
from hybridrt.speculative.drafter import Drafter


class PolicyScheduler(Scheduler):
    """Prompts in the order of PromptOrder, in chunks that let a step end in time. A request waits for
    a running prompt that computes a part of its own.

    Args:
        policy: decides how long steps may take and which prompts they compute.
        coordinator, chunked_prefill_size, drafter, encoder: as in Scheduler.
    """

    def __init__(
        self,
        coordinator: CacheCoordinator,
        chunked_prefill_size: int,
        policy: TrafficPolicy,
        drafter: Drafter | None = None,
        encoder: EncoderTasks | None = None,
    ) -> None:
        super().__init__(coordinator, chunked_prefill_size, drafter, encoder)
        self._policy = policy
        self.queues: ClientQueues = ClientQueues(policy)
        self._uncomputed = PromptWork()  # of admitted requests
        prefixes, cost = coordinator.prefixes, policy.cost
        prefixes.chunk_saves, prefixes.graph_tokens = cost.saves, cost.graph_tokens

    @property
    def pending(self) -> PromptWork:
        """The work that is left of the prompts of running and waiting requests."""
        return self._uncomputed + self.queues.pending

    def _queue(self, request: Request, known: int) -> None:
        if (place := self._place_for(request)) is not None:
            self._waiters.hold(request, place)
        else:
            self.queues.add(request, PromptWork.between(known, len(request.prompt) + len(request.output)))
        self._note_backlog()

    def _place_for(self, request: Request) -> Place | None:
        return self._waiters.place_for(request)

    def schedule(self) -> ScheduledStep | None:
        asked, step = self._policy.clock(), super().schedule()
        if step is not None:
            step.asked, step.planned = asked, self._policy.clock()
            step.work = StepWork.from_plan(step.plan)
        return step

    def step_consumed(self, step: ScheduledStep, gained: Sequence[int]) -> None:
        self._policy.ended(step.work, step.planned, sum(gained), step.late, step.read)
        super().step_consumed(step, gained)

    def clear(self) -> None:
        super().clear()
        self._uncomputed = PromptWork()
        self._note_backlog()

    def _remove_waiting(self, request: Request) -> None:
        super()._remove_waiting(request)
        self._note_backlog()

    def _stop_running(self, request: Request) -> None:
        if request.row is not None and (start := request.computed) < request.prefill_end:
            self._uncomputed -= PromptWork.between(start, request.prefill_end)
            self._note_backlog()
        super()._stop_running(request)

    def _schedule_prefill(self, step: ScheduledStep, prefilling: Iterable[Request]) -> None:
        admitted = [request for request in prefilling if request.row is not None]  # others were just retracted
        if self.encoder is not None:
            self.encoder.begin_step()
        self._uncomputed = _uncomputed(admitted)
        decode = step.plan.decode
        self.queues.end_floods(admitted)
        budget = self._policy.budget(self._most_tokens(decode), decode, self.pending, flooded=self.queues.flooded)
        order, idle = PromptOrder(self.queues, self._waiters, admitted), 0
        while order and budget.room() and (request := order.next()) is not None:
            if is_new := request.row is None:
                if self._waits_for_others(request):
                    continue
                if not self._admit(request, step.plan):
                    order.admits = False
                    continue
                admitted.append(request)
            start = request.computed
            if tokens := self._add_extend(step, request, budget.room(start, self._whole_rest(request))):
                budget.spend_tokens(start, tokens)
                self.queues.charge(request, PromptWork.between(start, start + tokens))
            elif is_new:
                idle += 1
                order.admits = idle < most_idle(decode)
        step.plan.eager = self._is_faster_without(step.plan)
        self._save_what_fits(step)
        self._uncomputed = _uncomputed(admitted)
        self._policy.note_passing(order.passing, sum(len(row.tokens) for row in step.plan.extend))
        self._note_backlog()

    def _is_faster_without(self, plan: StepPlan) -> bool:
        """Whether a graph could run the step, but shall not."""
        if not plan.extend:
            return False
        work, cost = StepWork.from_plan(plan), self._policy.cost
        return cost.has_graph(work) and not cost.takes_graph(work)

    def _whole_rest(self, request: Request) -> int:
        """Tokens that a prompt has left, if nothing but the budget cuts the next chunk; else 0."""
        start, end = request.computed, request.prefill_end
        if self.queues.flooded or request.audits or request.spans:
            return 0
        return end - start if self._coordinator.prefixes.end_for_states(request, start, end) == end else 0

    def _save_what_fits(self, step: ScheduledStep) -> None:
        """Prompts of a step that turned out to have no graph save one state each. The host launches such a step, and
        where it has to launch more for further states, the policy would avoid all steps without a graph."""
        cost, extend = self._policy.cost, step.plan.extend
        several = [i for i, row in enumerate(extend) if len(row.saves) > 1]  # few steps have any
        if several and cost.graphs and not cost.has_graph(StepWork.from_plan(step.plan)):
            requests = [request for request, _ in step.rows[-len(extend) :]]
            for i in several:
                saves = self._coordinator.prefixes.keep_one(requests[i], extend[i].computed, extend[i].saves)
                extend[i] = msgspec.structs.replace(extend[i], saves=saves)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        if not super()._admit(request, plan):
            return False
        self._waiters.add_source(request)
        return True

    def _note_backlog(self) -> None:
        self._policy.backlog = self._policy.prompt_seconds(self.pending) if self.pending.tokens else 0.0


def _uncomputed(admitted: Iterable[Request]) -> PromptWork:
    return sum([PromptWork.between(request.computed, request.prefill_end) for request in admitted], PromptWork())
