"""Tasks from rank 0 to the others, next to steps: masks, drafts, copies of a prefix."""

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.prefix_copy import PrefixPlaces


class MaskTask(msgspec.Struct, frozen=True):
    """Masks of the last launched step: `words` of int32, `width` a mask."""

    words: bytes
    width: int

    @classmethod
    def from_masks(cls, masks: np.ndarray) -> Self:
        """The task of masks [m, width] int32."""
        return cls(masks.tobytes(), masks.shape[1])

    def masks(self) -> np.ndarray:
        """[m, width] int32."""
        return np.frombuffer(self.words, np.int32).reshape(-1, self.width)


class DropTask(msgspec.Struct, frozen=True):
    """The last launched step gets no masks and is dropped."""


class JoinTask(msgspec.Struct, frozen=True):
    """Takes part in a round of replicas that share experts, without a step of this one."""

    def __call__(self, runner: ModelRunner) -> None:
        runner.join()


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
