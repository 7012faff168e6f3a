"""Runs the encoder of a model that sees: embeddings of spans, in a cache on the device."""

from collections import deque
from collections.abc import Generator, Sequence

import numpy as np
import torch

from hybridrt.base.forward_batch import Embeddings
from hybridrt.base.spans import EncoderInput
from hybridrt.models.base import CausalLM
from hybridrt.models.vision.tower import on_device
from hybridrt.runtime.run.host_embeddings import HostEmbeddings
from hybridrt.runtime.step.pack import EmbeddedTokens, StagingRing
from hybridrt.runtime.step.plan import EmbeddingFetch, EncoderTask, StepPlan

# Patches that a step with decode rows takes through one block of the encoder. On an H200 that is 0.5 ms for a tower
# of 0.45 billion weights, and a decode step of 9 billion weights takes 5.5 ms (benchmarks/bench_images.py). On a CPU
# with both, 256 are about a tenth of a decode step.
SLICE_PATCHES = {"cuda": 4096, "cpu": 256}
BATCH_PATCHES = 1 << 14  # most patches at once, or one span


class SpanEncoder:
    """The embedding cache [num_rows, hidden], and tasks that fill its rows.

    Tasks run in order on the steps' stream, each step before its rows. A step with decode rows runs
    a slice of them: some blocks of layers, or a part of one of a large picture. Other steps run all.
    """

    def __init__(self, model: CausalLM, num_rows: int, host_rows: int, staging: StagingRing) -> None:
        hidden = model.config.hidden_size
        self._host = HostEmbeddings(host_rows, hidden, model.dtype, model.device) if host_rows else None
        self._tower, self._staging, self._multiplier = model.tower, staging, model.embed.multiplier
        self._kept = torch.zeros(num_rows, hidden, dtype=model.dtype, device=model.device)
        self._waiting = deque[EncoderTask]()
        self._batch: list[EncoderTask] = []  # those that are being encoded
        self._slice_patches = SLICE_PATCHES[model.device.type]
        self._slices = self._made_already(())
        self._done = 0
        self._outdated = set[int]()  # tickets of unfinished tasks of which some rows have other embeddings now

    def advance(self, plan: StepPlan) -> None:
        """Launches the part of the encoder that a step runs."""
        for fetch in plan.fetch:
            self._fetch(fetch)
        self._waiting += plan.encode
        decoding, patches = len(plan.decode.rows) > 0, 0
        try:
            while self._batch or self._waiting:
                if not self._batch:
                    self._begin(self._slice_patches if decoding else None)
                patches += self._run_slice()
                if decoding and patches >= self._slice_patches and plan.after_encoder <= self._done:
                    return
        except BaseException:
            self._waiting.clear()
            self._batch.clear()
            self._outdated.clear()
            raise

    def encoded(self, ticket: int) -> bool:
        """Whether a task was launched to its end: later steps may read its rows."""
        return ticket <= self._done

    def embeddings(self, tokens: EmbeddedTokens[torch.Tensor]) -> Embeddings:
        return Embeddings(self._kept.index_select(0, tokens.rows), tokens.places)

    def _begin(self, most: int | None) -> None:
        """The next tasks of up to `most` patches, or one, in slices of as many; None: as many as go
        at once."""
        self._batch = [self._waiting.popleft()]
        embeds = self._batch[0].input.embeds
        while (
            self._waiting
            and self._waiting[0].input.embeds == embeds
            and _num_patches([*self._batch, self._waiting[0]]) <= (most or BATCH_PATCHES)
        ):
            self._batch.append(self._waiting.popleft())
        inputs = [task.input for task in self._batch]
        if embeds:
            self._slices = self._made_already(inputs)
        else:
            assert self._tower is not None, "images are refused without a tower"
            self._slices = self._tower.slices(inputs, most)

    def _made_already(self, inputs: Sequence[EncoderInput]) -> Generator[int, None, list[torch.Tensor]]:
        """Inputs that are embeddings themselves, as `Tower.slices`."""
        yield from ()
        found = on_device([given.patches for given in inputs], self._kept.device) * self._multiplier
        return list(found.to(self._kept.dtype).split([len(given.patches) for given in inputs]))

    def _run_slice(self) -> int:
        """Returns its patches. After the last one, stores the embeddings."""
        try:
            return next(self._slices)
        except StopIteration as end:
            for task, part in zip(self._batch, end.value, strict=True):
                if self._host is not None and len(task.host_rows):
                    self._host.keep(part, task.host_rows)
            made = [(task.rows, part) for task, part in zip(self._batch, end.value) if not self._is_outdated(task)]
            if made:
                rows, parts = zip(*made)
                self._store(np.concatenate(rows), torch.cat(parts))
            patches = _num_patches(self._batch)
            self._done, self._batch = self._batch[-1].ticket, []
            return patches

    def _is_outdated(self, task: EncoderTask) -> bool:
        found = task.ticket in self._outdated
        self._outdated.discard(task.ticket)
        return found

    def _fetch(self, fetch: EmbeddingFetch) -> None:
        """Tasks that have not ended and nobody waits for may have lost their rows to it."""
        assert self._host is not None, "fetches are planned where main memory keeps embeddings"
        for task in (*self._batch, *self._waiting):
            if np.isin(task.rows, fetch.rows).any():
                self._outdated.add(task.ticket)
        self._store(fetch.rows, self._host.fetch(fetch.host_rows))

    def _store(self, rows: np.ndarray, embeddings: torch.Tensor) -> None:
        on_device = self._staging.upload((rows,))[0]
        self._kept.index_copy_(0, on_device.long(), embeddings)


def _num_patches(tasks: Sequence[EncoderTask]) -> int:
    return sum(len(task.input.patches) for task in tasks)
