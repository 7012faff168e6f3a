"""Steps whose sampling waits for bitmasks: the forward pass is launched first, the sampling when the masks are there.

Which tokens a grammar allows depends on the tokens before, which the host reads while the device computes the step.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from hybridrt.base.errors import EngineError
from hybridrt.runtime.step.pack import StagingRing
from hybridrt.runtime.step.plan import StepHandle, StepPlan, StepResult, int32s

if TYPE_CHECKING:
    from hybridrt.runtime.run.step_runner import StepRunner

# The rest of a launched step. Takes a bitmask of all its lines of logits, [lines, ceil(vocab / 32)] int32; None: all
# tokens are allowed.
LaunchSampling = Callable[[torch.Tensor | None], StepHandle]
_MESSAGE_BYTES = 2**23  # ranks send masks in parts of this size at most


def mask_lines(plan: StepPlan, tokens: int) -> tuple[np.ndarray, int]:
    """[m] int32: which lines of a step's logits have masks, in the masks' order; and how many lines there are. A decode
    row has `tokens` lines, of which its input and its drafts have masks; an extend row that samples has one."""
    n, drafts = len(plan.decode), plan.decode.num_drafts.tolist()
    lines = list[int]()
    for i in plan.constrained:
        first = i * tokens if i < n else n * tokens + i - n
        lines += range(first, first + 1 + (drafts[i] if i < n else 0))
    return int32s(lines), n * tokens + sum(row.sample for row in plan.extend)


class ConstrainedStep:
    """A launched step that samples when it has its masks.

    Args:
        plan: what was launched; tokens: T of its decode rows.
        sampling: the rest of it.
    """

    def __init__(self, plan: StepPlan, tokens: int, sampling: LaunchSampling) -> None:
        self._lines, self._total = mask_lines(plan, tokens)
        self._sampling = sampling
        self._masks = list[np.ndarray]()
        self._launched: StepHandle | None = None

    def take(self, masks: np.ndarray, staging: StagingRing) -> bool:
        """Takes masks [n, ceil(vocab / 32)] int32, the next ones in order. With the last of them it copies all masks to
        the device at once and launches the rest of the step. Returns True then.

        Raises:
            EngineError: there are more masks than constrained lines.
        """
        self._masks.append(masks)
        missing = len(self._lines) - sum(map(len, self._masks))
        if missing < 0:
            raise EngineError(f"{-missing} masks too many for a step with {len(self._lines)} constrained lines")
        if missing:
            return False
        together = masks if len(self._masks) == 1 else np.concatenate(self._masks)
        if len(self._lines) == self._total:
            (bitmask,) = staging.upload((together,))
        else:
            lines, words = staging.upload((self._lines, together))
            bitmask = torch.full((self._total, masks.shape[1]), -1, dtype=torch.int32, device=staging.device)
            bitmask.index_copy_(0, lines.long(), words)
        self._launched = self._sampling(bitmask)
        return True

    def ready(self) -> bool:
        """As StepHandle.ready; also True before the step has its masks, when `result` raises."""
        return self._launched is None or self._launched.ready()

    def result(self) -> StepResult:
        """As StepHandle.result.

        Raises:
            EngineError: the step has not got its masks.
        """
        if self._launched is None:
            raise EngineError("the step has not sampled: give it its masks first (Executor.sample)")
        return self._launched.result()


class MaskTask(msgspec.Struct, frozen=True):
    """Masks of the step that was launched last: `words` of int32, `width` a mask. Every rank gets them."""

    words: bytes
    width: int

    def __call__(self, runner: "StepRunner") -> None:
        runner.sample(np.frombuffer(self.words, np.int32).reshape(-1, self.width))


def mask_tasks(masks: np.ndarray) -> Iterator[MaskTask]:
    """Masks [m, width] in messages that a channel takes."""
    width = masks.shape[1]
    rows = max(_MESSAGE_BYTES // (4 * width), 1)
    for start in range(0, len(masks), rows):
        yield MaskTask(masks[start : start + rows].tobytes(), width)
