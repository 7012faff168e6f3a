"""The task to draft, which every rank of the target runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hybridrt.base.errors import ConfigError
from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.step.plan import StepHandle

if TYPE_CHECKING:
    from hybridrt.runtime.run.step_runner import StepRunner


class DraftTask(msgspec.Struct, frozen=True):
    """Has a runner's device drafter draft `steps` places: what every rank is told to do."""

    rows: Sequence[DraftRow]
    steps: int
    topk: int

    def __call__(self, runner: "StepRunner") -> StepHandle:
        if runner.drafter is None:
            raise ConfigError("a task to draft on a runner without a device drafter")
        return runner.drafter.draft(self.rows, self.steps, self.topk)


# Calls a task with the runner of every rank; returns what the first one's call returns.
Everywhere = Callable[[DraftTask], StepHandle]
