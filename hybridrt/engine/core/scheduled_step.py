"""A step that was scheduled: its plan, and the requests of its rows."""

import time
from dataclasses import dataclass, field

from hybridrt.base.errors import EngineError
from hybridrt.engine.core.step_cost import StepWork
from hybridrt.engine.request.sample_request import Request
from hybridrt.runtime.step.plan import StepPlan, StepResult

NO_WORK = StepWork()


@dataclass(slots=True)
class ScheduledStep:
    """A plan and the requests of its rows.

    Attributes:
        rows: each request and how many tokens it may gain (drafts + 1; 1 on a last chunk; 0 on
            other chunks), in the plan's order: decode rows, then extend rows.
        max_new_tokens: the sum of these numbers.
        work: what its time is predicted from.
        asked, planned, read: when its scheduling began and ended, and when its result was read, by the clock of the
            scheduler's policy. Without a policy neither these nor `work` are set.
        began: by `time.perf_counter`.
        late: the device finished before the host read the result, so its duration is unknown.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    rows: list[tuple[Request, int]] = field(default_factory=list)
    max_new_tokens: int = 0
    work: StepWork = NO_WORK
    asked: float = 0.0
    planned: float = 0.0
    read: float | None = None
    late: bool = False
    began: float = field(default_factory=time.perf_counter)

    def check_result(self, result: StepResult) -> None:
        """Raises EngineError if the result has a wrong number of rows, a row gained more than its
        limit, or an unfinished request gained no token.
        """
        rows = [row for row in self.rows if row[1]] if self.plan.extend else self.rows  # every decode row samples
        if not len(rows) == len(result.tokens) == len(result.logprobs):
            raise EngineError(
                f"{len(rows)} rows sampled; the result has {len(result.tokens)} lists of tokens and "
                f"{len(result.logprobs)} of log-probabilities"
            )
        for (request, max_new), tokens in zip(rows, result.tokens, strict=True):
            if not len(tokens) <= max_new or (not tokens and request.finish_reason is None):
                raise EngineError(
                    f"row of request {request.request_id!r} gained {len(tokens)} tokens; 1 to {max_new} expected"
                )
