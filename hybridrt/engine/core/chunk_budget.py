"""How many prompt tokens a step gets, and when it is scheduled, to keep a target of latency."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch

from hybridrt.base.config import EngineConfig
from hybridrt.engine.core.step_cost import StepCost, StepWork
from hybridrt.runtime.step.pack_padded import Bucket
from hybridrt.runtime.step.plan import DecodeRows, StepPlan

LEAST_TOKENS = 16  # allowed whatever a step's predicted time
LATE_SECONDS, LATE_FACTOR = 0.25, 2.0  # a longer wait raises the target in proportion
# One of LONG_EVERY steps with decode rows may need LATE_FACTOR times the target, once the queue has
# waited for LONG_WAIT targets: 99 of 100 tokens still come in time. At most MAX_LONG are saved up.
LONG_EVERY, LONG_WAIT, MAX_LONG = 150, 4, 2.0
# Part of a target left free for errors of the prediction: so many median errors.
MARGIN_ERRORS, MAX_MARGIN = 2, 0.1
# What prompts may add to a step, as a share of the time of its decode rows: with any target, and
# with target_itl_ms="auto". Then a step is at most four times as long as without prompts, and long
# enough that few tokens a second are lost.
LEAST_SHARE, AUTO_SHARE = 0.1, 3.0
_LATE_STEPS = 8  # late steps that are observed as one
# The next step is scheduled this lead before the running one ends. A late launch doubles the lead,
# other steps shrink it a little.
_LEAD, _MIN_LEAD, _MAX_LEAD, _SHRINK = 0.004, 0.001, 0.05, 0.998


class ChunkBudget:
    """Prompt tokens that a step may still get.

    Args:
        tokens: at most so many.
        cost: predicts the step's time; None: there is no target.
        target: seconds within which the step is to end.
        work: present work of the step.
        share: the step may always take longer than `work` alone, by this share of its time.
    """

    def __init__(
        self,
        tokens: int,
        cost: StepCost | None = None,
        target: float = 0.0,
        work: StepWork | None = None,
        share: float = LEAST_SHARE,
    ) -> None:
        self._tokens, self._cost, self._target, self._work = tokens, cost, target, work or StepWork()
        self._rooms: dict[int, int] = {}  # tokens by start, until the step has another chunk
        alone = cost.predict(self._work) if cost is not None else None
        if alone is not None:
            self._target = max(target, (1 + share) * alone)

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
        """Returns at most `max_tokens`. It fills its graph, unless a long context or `max_tokens`
        prevents that.
        """
        assert self._cost is not None

        def late(tokens: int) -> bool:
            return not self._ends_in_time(start, tokens)

        ends = [0, *(fill for fill in self._cost.fills(self._work) if fill < max_tokens), max_tokens]
        found = bisect_left(ends, True, lo=1, key=late)
        low = ends[found - 1]
        if found == len(ends) or late(low + 1):
            return low
        return bisect_left(range(ends[found]), True, lo=low + 1, key=late) - 1

    def _ends_in_time(self, start: int, tokens: int) -> bool:
        assert self._cost is not None
        seconds = self._cost.predict(self._work.with_chunk(start, tokens, saves=1))
        return seconds is not None and seconds <= self._target


class ItlTarget:
    """Keeps the time between tokens (inter-token latency) under a target: prompts get shorter
    chunks in steps with decode rows.

    Under overload throughput matters more: once the first request of the queue has waited for
    LATE_SECONDS, the target rises in proportion, up to LATE_FACTOR. Few single steps may be as long
    earlier: they end bursts of arrivals, which make first tokens late.

    The host does not see the end of a step that samples nothing or ended before it was read: its
    work is observed together with the next step that is waited for.

    Args:
        seconds: between tokens.
        cost: None: one without graphs for prompts.
        clock: seconds, as `RequestMetrics.arrival_time` has them.
        share: the share of `ChunkBudget`.
    """

    def __init__(
        self,
        seconds: float,
        *,
        cost: StepCost | None = None,
        clock: Callable[[], float] = time.monotonic,
        share: float = LEAST_SHARE,
    ) -> None:
        self.seconds, self.cost, self.clock, self._share = seconds, cost or StepCost(), clock, share
        self._last_end = 0.0
        self._unseen: list[StepWork] = []  # launched before the next awaited one
        self._unseen_start = 0.0
        self._long_steps = 0.0  # how many longer steps are allowed
        self._lead = _LEAD

    @classmethod
    def from_config(cls, config: EngineConfig, device: torch.device, buckets: Iterable[Bucket]) -> "ItlTarget | None":
        """The target of `EngineConfig.target_itl_ms`; None if there is none. `buckets`: those of the
        captured graphs of steps with prompts.
        """
        asked = config.target_itl_ms
        if asked is None or (asked == "auto" and device.type == "cpu"):
            return None
        if asked == "auto":
            return cls(0.0, cost=StepCost(buckets), share=AUTO_SHARE)
        return cls(float(asked) / 1e3, cost=StepCost(buckets))

    def budget(self, tokens: int, decode: DecodeRows, since: float | None = None) -> ChunkBudget:
        """The budget of a step with these decode rows and at most `tokens` prompt tokens. `since`:
        arrival time of the first request of the queue; None: the queue is empty.
        """
        if not len(decode):
            return ChunkBudget(tokens)
        waited = 0.0 if since is None else self.clock() - since
        factor = min(max(waited / LATE_SECONDS, 1.0), LATE_FACTOR)
        if waited > LONG_WAIT * self.seconds and self._long_steps >= 1:
            factor = LATE_FACTOR
        target = self.seconds * (1 - self._margin) * factor
        return ChunkBudget(tokens, self.cost, target, StepWork.from_plan(StepPlan(decode=decode)), self._share)

    def spare_seconds(self, plan: StepPlan, launched: float) -> float:
        """How long scheduling of the next step can be put off while this plan runs as the last one:
        more prompts can join then. 0 if its end is unknown. `launched`: when, by `clock`.
        """
        seconds = self.cost.predict(StepWork.from_plan(plan))
        if seconds is None or self._unseen:
            return 0.0
        end = max(launched, self._last_end) + seconds * (1 - self._margin)
        return max(end - self._lead - self.clock(), 0.0)

    @property
    def _margin(self) -> float:
        return min(MARGIN_ERRORS * (self.cost.error or 0.0), MAX_MARGIN)

    def ended(self, plan: StepPlan, launched: float, gained: int, late: bool = False) -> None:
        """Observes a step that was read. Call it in launch order.

        Args:
            launched: when, by `clock`.
            gained: tokens of all its rows; 0: it was not waited for, or failed.
            late: it had ended before it was read, because the launch of the next one took longer.
                Its end would be seen too late, and the next step would seem to need no time.
        """
        if not self._unseen:
            self._unseen_start = launched
        self._unseen.append(work := StepWork.from_plan(plan))
        self._lead = min(2 * self._lead, _MAX_LEAD) if late else max(self._lead * _SHRINK, _MIN_LEAD)
        if work.decode_tokens:
            self._long_steps += 1 / LONG_EVERY - ((self.cost.predict(work) or 0.0) > self.seconds)
            self._long_steps = min(max(self._long_steps, -MAX_LONG), MAX_LONG)
        if not gained or (late and len(self._unseen) < _LATE_STEPS):
            return
        now, works = self.clock(), self._unseen
        start = max(self._unseen_start, self._last_end)
        self._last_end, self._unseen = now, []
        if now > start:
            self.cost.observe(works, now - start)
