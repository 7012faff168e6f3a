"""How long the latest steps took, and what they computed."""

import time
from collections import deque
from dataclasses import dataclass

from hybridrt.runtime.step.plan import StepPlan

LAST_STEPS = 240


@dataclass(frozen=True, slots=True)
class StepsView:
    """The latest steps, oldest first.

    Attributes:
        total: steps since the engine was built.
        milliseconds: from the launch of a step, or the result of the one before if that came later,
            to its own result. A step that overlaps another one is counted once.
        decode_rows, prompt_tokens: what each step computed.
    """

    total: int
    milliseconds: tuple[float, ...]
    decode_rows: tuple[int, ...]
    prompt_tokens: tuple[int, ...]


class StepTimes:
    """Notes each step whose result was read."""

    def __init__(self) -> None:
        self._total, self._read = 0, 0.0
        self._steps = deque[tuple[float, int, int]](maxlen=LAST_STEPS)

    def note(self, plan: StepPlan, launched: float) -> None:
        """Call it when a result was read. `launched`: when the step was, by `time.perf_counter`."""
        now, tokens = time.perf_counter(), sum([len(row.tokens) for row in plan.extend])
        self._steps.append((now - max(launched, self._read), len(plan.decode), tokens))
        self._total, self._read = self._total + 1, now

    def view(self) -> StepsView:
        return StepsView(
            self._total,
            tuple(round(1000 * seconds, 3) for seconds, _, _ in self._steps),
            tuple(rows for _, rows, _ in self._steps),
            tuple(tokens for _, _, tokens in self._steps),
        )
