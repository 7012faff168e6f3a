"""Tasks from rank 0 to the other ranks that are no steps: masks, drafts, copies of a prefix."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.prefix_copy import PrefixPlaces

_MESSAGE_BYTES = 2**23


class MaskTask(msgspec.Struct, frozen=True):
    """Masks of the last launched step: `words` of int32, `width` a mask. `more`: others follow."""

    words: bytes
    width: int
    more: bool

    def masks(self) -> np.ndarray:
        """[m, width] int32."""
        return np.frombuffer(self.words, np.int32).reshape(-1, self.width)


class DropTask(msgspec.Struct, frozen=True):
    """The last launched step gets no masks and is dropped."""


class DraftTask(msgspec.Struct, frozen=True):
    """Has a runner's device drafter draft `steps` places."""

    rows: Sequence[DraftRow]
    steps: int
    topk: int

    def __call__(self, runner: ModelRunner) -> None:
        runner.draft(self.rows, self.steps, self.topk)


class PrefixCopy(msgspec.Struct, frozen=True):
    """Copies a prefix out of the pools; with `write` into them."""

    prefix: PrefixPlaces
    write: bool

    def __call__(self, runner: ModelRunner) -> None:
        if self.write:
            runner.write_prefix(self.prefix)
        else:
            runner.read_prefix(self.prefix)


def mask_tasks(masks: np.ndarray) -> Iterator[MaskTask]:
    """Masks [m, width] in parts that fit a message."""
    width = masks.shape[1]
    rows = max(_MESSAGE_BYTES // (4 * width), 1)
    for start in range(0, len(masks), rows):
        yield MaskTask(masks[start : start + rows].tobytes(), width, start + rows < len(masks))
