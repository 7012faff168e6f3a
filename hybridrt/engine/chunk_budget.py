"""How many prompt tokens a step takes: bounded by its number of tokens, and by a target for the time between tokens."""

import time
from collections.abc import Callable

from hybridrt.engine.step_cost import StepCost, StepWork
from hybridrt.runtime.step import DecodeRows, StepPlan

LEAST_TOKENS = 16  # prompt tokens that a step may take with any predicted time
LATE_SECONDS, LATE_FACTOR = 0.25, 2.0  # after a wait of so many seconds the target is multiplied by the factor
MAX_MARGIN = 0.1  # largest part of the target that is left free for errors of the prediction
LEAST_SHARE = 0.1  # of the time of a step's decode rows: prompts may take it with any target
_ROUND = 16  # longer chunks end at multiples of it


class ChunkBudget:
    """Prompt tokens that a step may still take.

    Args:
        tokens: at most so many.
        cost: predicts the step's time; None: there is no target.
        target: seconds within which the step is to end. If its decode rows alone take longer, it may take LEAST_SHARE
            longer than they do.
        work: what the step has already.
    """

    def __init__(
        self, tokens: int, cost: StepCost | None = None, target: float = 0.0, work: StepWork | None = None
    ) -> None:
        self._tokens, self._cost, self._target, self._work = tokens, cost, target, work or StepWork()
        alone = cost.predict(self._work) if cost is not None else None
        if alone is not None:
            self._target = max(target, (1 + LEAST_SHARE) * alone)

    def room(self, start: int = 0) -> int:
        """Tokens of the next chunk, behind the first `start` of its prompt."""
        if self._cost is None or self._tokens <= 0:
            return max(self._tokens, 0)
        least = min(LEAST_TOKENS - self._work.prompt_tokens, self._tokens)
        # At most twice the largest step so far: the fit says nothing about tokens far beyond it.
        known = min(2 * self._cost.max_prompt_tokens - self._work.prompt_tokens, self._tokens)
        return max(least, self._in_time(start, known), 0)

    def take(self, start: int, tokens: int) -> None:
        """Adds a chunk of `tokens` to the step, behind the first `start` of its prompt."""
        if tokens:
            self._tokens -= tokens
            self._work = self._work.with_chunk(start, tokens)

    def _in_time(self, start: int, max_tokens: int) -> int:
        """The longest chunk of at most `max_tokens` tokens whose step ends in time; more tokens never end earlier."""
        low, high = 0, max(max_tokens, 0)
        while low < high:
            middle = (low + high + 1) // 2
            if self._ends_in_time(start, middle):
                low = middle
            else:
                high = middle - 1
        return low if low < _ROUND or low == max_tokens else low - low % _ROUND

    def _ends_in_time(self, start: int, tokens: int) -> bool:
        assert self._cost is not None
        seconds = self._cost.predict(self._work.with_chunk(start, tokens, saves=1))  # it may save a state
        return seconds is not None and seconds <= self._target


class ItlTarget:
    """Keeps the time between tokens (inter-token latency) under a target, by shorter chunks of prompts in steps with
    decode rows. Steps without decode rows take as many tokens as they may.

    Under overload throughput matters more: while the first request of the queue has waited for more than LATE_SECONDS,
    a step may take LATE_FACTOR times as long.

    The costs are fitted to the steps that the engine launches and reads. The host does not see when a step ends that
    samples nothing: its work is observed together with the next step that is waited for.

    Args:
        seconds: between tokens.
        cost: None: one that knows of no graphs with prompts.
        clock: seconds, as `RequestMetrics.arrival_time` has them.
    """

    def __init__(
        self, seconds: float, *, cost: StepCost | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.cost, self.clock = seconds, cost or StepCost(), clock
        self._last_end = 0.0
        self._unseen: list[StepWork] = []  # launched before the step that is waited for next, and read
        self._unseen_start = 0.0

    def budget(self, tokens: int, decode: DecodeRows, since: float | None = None) -> ChunkBudget:
        """The budget of a step with these decode rows, which may take `tokens` prompt tokens.

        Args:
            since: arrival time of the first request of the queue; None: the queue is empty.
        """
        if not len(decode):
            return ChunkBudget(tokens)
        late = since is not None and self.clock() - since > LATE_SECONDS
        margin = min(4 * (self.cost.error or 0.0), MAX_MARGIN)  # of normal errors, 99 of 100 are within 3.8 medians
        target = self.seconds * (1 - margin) * (LATE_FACTOR if late else 1.0)
        return ChunkBudget(tokens, self.cost, target, StepWork.of(StepPlan(decode=decode)))

    def ended(self, plan: StepPlan, launched: float, gained: int) -> None:
        """Observes a step that was read. Call it in launch order.

        Args:
            launched: when, by `clock`.
            gained: tokens of all its rows; 0: it was not waited for, or failed.
        """
        if not self._unseen:
            self._unseen_start = launched
        self._unseen.append(StepWork.of(plan))
        if not gained:
            return
        now, works = self.clock(), self._unseen
        start = max(self._unseen_start, self._last_end)
        self._last_end, self._unseen = now, []
        if now > start:
            self.cost.observe(works, now - start)
