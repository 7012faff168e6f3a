"""Durations of the latest steps, with the rows and tokens that they computed."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

LAST_STEPS = 240


class StepTime(msgspec.Struct, frozen=True):
    """A step. began, read: when its scheduling began and its result was read, by `time.perf_counter`."""

    began: float
    read: float
    decode_rows: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StepsView:
    """The latest steps, oldest first.

    Attributes:
        total: steps that were launched since the engine was built.
        milliseconds: from the scheduling of a step, or the result of the one before if that came later,
            to its own result. A step that overlaps another one is counted once.
        decode_rows, prompt_tokens: what each step computed.
    """

    total: int
    milliseconds: tuple[float, ...]
    decode_rows: tuple[int, ...]
    prompt_tokens: tuple[int, ...]

    @classmethod
    def of_steps(cls, total: int, steps: Iterable[StepTime]) -> "StepsView":
        """`steps`: the latest ones, oldest first."""
        steps, milliseconds, last_read = tuple(steps), list[float](), 0.0
        for step in steps:
            milliseconds.append(round(1000 * (step.read - max(step.began, last_read)), 3))
            last_read = step.read
        rows, tokens = tuple(step.decode_rows for step in steps), tuple(step.prompt_tokens for step in steps)
        return cls(total, tuple(milliseconds), rows, tokens)
