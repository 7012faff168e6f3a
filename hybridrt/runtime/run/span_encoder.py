"""Runs the encoder of a model that sees: embeddings of spans, in a cache on the device."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from hybridrt.base.forward_batch import Embeddings
from hybridrt.models.base import CausalLM
from hybridrt.runtime.step.pack import EmbeddedTokens, StagingRing
from hybridrt.runtime.step.plan import EncoderTask, StepPlan

# Patches that pass through one block of the encoder in a step with decode rows: by its operations 0.6 ms on an H100
# with a tower of 0.45 billion weights (not measured), where a decode step of 9 billion weights takes 7 ms.
SLICE_PATCHES = 4096
BATCH_PATCHES = 4 * SLICE_PATCHES  # most patches at once, or one span


class SpanEncoder:
    """The embedding cache [num_rows, hidden], and tasks that fill its rows.

    Tasks run in order on the steps' stream, each step before its rows. A step with decode rows runs
    a slice of them: some blocks of layers. Other steps run all.
    """

    def __init__(self, model: CausalLM, num_rows: int, staging: StagingRing) -> None:
        assert model.tower is not None, "only a model with a tower has an encoder"
        self._tower, self._staging = model.tower, staging
        self._kept = torch.zeros(num_rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self._waiting = deque[EncoderTask]()
        self._batch: list[EncoderTask] = []  # those that are being encoded
        self._slices = self._tower.slices(())
        self._done = 0

    def advance(self, plan: StepPlan) -> None:
        """Launches what a step runs of the encoder."""
        self._waiting += plan.encode
        decoding, patches = len(plan.decode.rows) > 0, 0
        try:
            while self._batch or self._waiting:
                if not self._batch:
                    self._begin(SLICE_PATCHES if decoding else BATCH_PATCHES)
                patches += _num_patches(self._batch)
                self._run_block()
                if decoding and patches >= SLICE_PATCHES and plan.after_encoder <= self._done:
                    return
        except BaseException:
            self._waiting.clear()
            self._batch.clear()
            raise

    def encoded(self, ticket: int) -> bool:
        """Whether a task was launched to its end: later steps may read its rows."""
        return ticket <= self._done

    def embeddings(self, tokens: EmbeddedTokens[torch.Tensor]) -> Embeddings:
        return Embeddings(self._kept.index_select(0, tokens.rows), tokens.places)

    def _begin(self, most: int) -> None:
        """The next tasks of up to `most` patches, or one."""
        self._batch = [self._waiting.popleft()]
        while self._waiting and _num_patches([*self._batch, self._waiting[0]]) <= most:
            self._batch.append(self._waiting.popleft())
        self._slices = self._tower.slices([task.input for task in self._batch])

    def _run_block(self) -> None:
        """After the last one, stores the embeddings."""
        try:
            next(self._slices)
        except StopIteration as end:
            rows = self._staging.upload((np.concatenate([task.rows for task in self._batch]),))[0]
            self._kept.index_copy_(0, rows.long(), torch.cat(end.value))
            self._done, self._batch = self._batch[-1].ticket, []


def _num_patches(tasks: Sequence[EncoderTask]) -> int:
    return sum(len(task.input.patches) for task in tasks)
