"""How many prompt tokens a step may get, by its tokens and its predicted time."""

from bisect import bisect_left

from hybridrt.engine.core.step_cost import StepCost, StepWork

LEAST_TOKENS = 16  # allowed whatever a step's predicted time
REPAY = 2.0  # the time of a chunk compared with that of one of LEAST_TOKENS


class ChunkBudget:
    """Prompt tokens that a step may still get.

    Args:
        tokens: at most so many.
        cost: predicts the step's time; None: the step has no bound of time.
        seconds: within which the step is to end.
        work: present work of the step.
        most: a step may take so many seconds if its first chunk would need much of `seconds` even
            with few tokens, as after a long context.
    """

    def __init__(
        self,
        tokens: int,
        cost: StepCost | None = None,
        seconds: float = 0.0,
        work: StepWork | None = None,
        most: float = 0.0,
    ) -> None:
        self._tokens, self._cost, self._seconds, self._work = tokens, cost, seconds, work or StepWork()
        self._most = most
        self._rooms: dict[int, int] = {}  # tokens by start, until the step has another chunk

    def room(self, start: int = 0) -> int:
        """Tokens of the next chunk, after the first `start` of its prompt."""
        if self._cost is None or self._tokens <= 0:
            return max(self._tokens, 0)
        if start not in self._rooms:
            self._rooms[start] = self._find_room(start)
        return self._rooms[start]

    def _find_room(self, start: int) -> int:
        assert self._cost is not None
        least = min(LEAST_TOKENS - self._work.prompt_tokens, self._tokens)
        # The fit says nothing about tokens far beyond the largest step.
        known = min(2 * self._cost.max_prompt_tokens - self._work.prompt_tokens, self._tokens)
        return max(least, self._in_time(start, max(known, 0)), 0)

    def spend_tokens(self, start: int, tokens: int) -> None:
        """Adds a chunk of `tokens` to the step, after the first `start` of its prompt."""
        self._tokens -= tokens
        if tokens and self._cost is not None:
            self._work = self._work.with_chunk(start, tokens)
            self._rooms.clear()

    def _in_time(self, start: int, max_tokens: int) -> int:
        """At most `max_tokens`. The chunk fills its graph, unless a long context or `max_tokens`
        prevents that."""
        assert self._cost is not None
        bound = self._bound(start)

        def late(tokens: int) -> bool:
            return not self._ends_in_time(start, tokens, bound)

        ends = [0, *(fill for fill in self._cost.fills(self._work) if fill < max_tokens), max_tokens]
        if len(ends) > 2 and not late(ends[-2] + 1):
            # A chunk without a graph. After a long context it may take less time than a graph.
            return bisect_left(range(max_tokens + 1), True, lo=ends[-2] + 2, key=late) - 1
        found = bisect_left(ends, True, lo=1, key=late)
        low = ends[found - 1]
        if found == len(ends) or late(low + 1):
            return low
        return bisect_left(range(ends[found]), True, lo=low + 1, key=late) - 1

    def _bound(self, start: int) -> float:
        """Seconds of a step with a chunk after `start` tokens."""
        assert self._cost is not None
        if self._work.prompt_tokens or self._most <= self._seconds:
            return self._seconds
        alone, least = self._cost.predict(self._work), self._cost.predict(self._work.with_chunk(start, LEAST_TOKENS))
        if alone is None or least is None:
            return self._seconds
        return max(self._seconds, min(alone + REPAY * (least - alone), self._most))

    def _ends_in_time(self, start: int, tokens: int, bound: float) -> bool:
        assert self._cost is not None
        seconds = self._cost.predict(self._work.with_chunk(start, tokens, saves=1))
        return seconds is not None and seconds <= bound
