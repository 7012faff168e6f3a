"""How many prompt tokens a step takes: what is left of its tokens, and of the time between tokens that is aimed at."""

import time
from collections.abc import Callable

from hybridrt.engine.step_cost import StepCost, StepWork
from hybridrt.runtime.step import DecodeRows, StepPlan

LEAST_TOKENS = 16  # prompt tokens of a step, whatever they cost
LATE_SECONDS, LATE_FACTOR = 0.25, 2.0  # a request that has waited so long for its turn: the target counts so often
MOST_MARGIN = 0.1  # of the target, for errors of the prediction
LEAST_SHARE = 0.1  # of the time of a step's decode rows that its prompts may take, whatever the target
_ROUND = 16  # longer chunks end at multiples of it


class ChunkBudget:
    """Prompt tokens that a step may still take.

    Args:
        tokens: at most so many.
        cost, target: chunks are as long as their step is predicted to end within `target` seconds, or to take little
            longer than without them (LEAST_SHARE); None: any length.
        work: what the step holds already.
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
        # Not more than twice what has been seen: what costs nothing up to there may cost a lot behind it.
        known = min(2 * self._cost.most_prompt_tokens - self._work.prompt_tokens, self._tokens)
        return max(least, self._in_time(start, known), 0)

    def take(self, start: int, tokens: int) -> None:
        """A chunk of `tokens` is part of the step."""
        if tokens:
            self._tokens -= tokens
            self._work = self._work.with_chunk(start, tokens)

    def _in_time(self, start: int, most: int) -> int:
        """The longest chunk of at most `most` tokens whose step ends in time; more tokens never end earlier."""
        low, high = 0, max(most, 0)
        while low < high:
            middle = (low + high + 1) // 2
            if self._ends_in_time(start, middle):
                low = middle
            else:
                high = middle - 1
        return low if low < _ROUND or low == most else low - low % _ROUND

    def _ends_in_time(self, start: int, tokens: int) -> bool:
        assert self._cost is not None
        seconds = self._cost.predict(self._work.with_chunk(start, tokens, saves=1))  # it may save a state
        return seconds is not None and seconds <= self._target


class ItlTarget:
    """Keeps steps that decode within a time between tokens (inter-token latency), by the length of the chunks that they
    take beside. Steps without decode rows take as many tokens as they may.

    Where requests come faster than they can be served, it gives way: once the first of the queue has waited for
    LATE_SECONDS, a step may take LATE_FACTOR times as long. Else throughput would fall when it is needed most.

    It learns what steps cost from those that the engine launches and reads. Steps that sample nothing end unseen; they
    count together with the next one that is waited for.

    Args:
        seconds: between tokens.
        clock: seconds, as `RequestMetrics.arrival_time` has them.
    """

    def __init__(
        self, seconds: float, *, cost: StepCost | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.cost, self._clock = seconds, cost or StepCost(), clock
        self._last_end = 0.0
        self._unseen: list[StepWork] = []  # launched before the step that is waited for next, and read
        self._unseen_start = 0.0

    def budget(self, tokens: int, decode: DecodeRows, since: float | None = None) -> ChunkBudget:
        """Of a step with these decode rows, which may take `tokens` prompt tokens.

        Args:
            since: when the first request of the queue has come; None: the queue is empty.
        """
        if not len(decode):
            return ChunkBudget(tokens)
        late = since is not None and self._clock() - since > LATE_SECONDS
        margin = min(2 * (self.cost.error or 0.0), MOST_MARGIN)
        target = self.seconds * (1 - margin) * (LATE_FACTOR if late else 1.0)
        return ChunkBudget(tokens, self.cost, target, StepWork.of(StepPlan(decode=decode)))

    def launched(self) -> float:
        """Now: when a step is launched. `ended` takes it."""
        return self._clock()

    def ended(self, plan: StepPlan, launched: float, gained: int) -> None:
        """A step was read, in launch order.

        Args:
            gained: tokens of all its rows; 0: it was not waited for, or failed.
        """
        if not self._unseen:
            self._unseen_start = launched
        self._unseen.append(StepWork.of(plan))
        if not gained:
            return
        now, works = self._clock(), self._unseen
        start = max(self._unseen_start, self._last_end)
        self._last_end, self._unseen = now, []
        if now > start:
            self.cost.observe(works, now - start)
