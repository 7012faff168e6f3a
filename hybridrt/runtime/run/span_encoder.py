"""Runs the encoder of a model that sees: embeddings of spans, in a cache on the device."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridrt.base.forward_batch import Embeddings
from hybridrt.models.base import CausalLM
from hybridrt.runtime.step.pack import EmbeddedTokens
from hybridrt.runtime.step.plan import EncoderTask

# A step with decode rows computes so much of the encoder, or one block of layers: 10 to 15% of the time of a step of
# a model with 9 billion parameters on an H100.
STEP_FLOPS = {"cuda": 3e11, "cpu": 3e9}
GROUP_PATCHES = 4096  # of one block of layers then; more only in one picture


@dataclass
class _Group:
    """Tasks that are encoded together.

    Attributes:
        block_flops: of one block of layers.
        slices: None: not begun.
    """

    tasks: Sequence[EncoderTask]
    block_flops: float
    slices: Generator[None, None, list[torch.Tensor]] | None = None


class SpanEncoder:
    """The embedding cache [num_rows, hidden], and tasks that fill its rows.

    Tasks run in order, on the stream of the steps. Next to decode rows, a step computes a few
    blocks of layers, so that no token waits for a whole picture.
    """

    def __init__(self, model: CausalLM, num_rows: int, device: torch.device) -> None:
        self._model, self._device = model, device
        self._kept = torch.zeros(num_rows, model.config.hidden_size, dtype=model.dtype, device=device)
        self._groups: deque[_Group] = deque()
        self._launched = 0  # tasks up to this ticket

    def queue(self, tasks: Sequence[EncoderTask], next_to_decode: bool) -> None:
        """Adds tasks, in order of their tickets."""
        spec = self._model.config.vision
        assert spec is not None, "only a model with `vision` has tasks"
        for group in grouped(tasks, GROUP_PATCHES if next_to_decode else None):
            flops = sum(spec.block_flops(len(task.input.patches)) for task in group)
            self._groups.append(_Group(group, flops))

    def advance(self, next_to_decode: bool) -> None:
        """Launches the tasks that a step has time for: with decode rows a part, else all."""
        spent, most = 0.0, STEP_FLOPS[self._device.type]
        while self._groups:
            spent += self._groups[0].block_flops
            if next_to_decode and spent > most and spent > self._groups[0].block_flops:
                return
            self._advance()

    def finish(self, ticket: int) -> None:
        """Launches the tasks up to `ticket`."""
        while self._groups and not self.encoded(ticket):
            self._advance()

    def encoded(self, ticket: int) -> bool:
        """Whether all of a task has been launched. Steps launched later have its embeddings."""
        return ticket <= self._launched

    def embeddings(self, tokens: EmbeddedTokens[torch.Tensor]) -> Embeddings:
        return Embeddings(self._kept.index_select(0, tokens.rows), tokens.places)

    def _advance(self) -> None:
        """One block of the first group. A group that fails is given up: nobody waits for it."""
        group = self._groups[0]
        try:
            if group.slices is None:
                group.slices = self._model.encode_in_slices([task.input for task in group.tasks])
            next(group.slices)
        except StopIteration as end:
            self._groups.popleft()
            self._keep(group.tasks, end.value)
        except BaseException:
            self._groups.popleft()
            raise

    def _keep(self, tasks: Sequence[EncoderTask], made: Sequence[torch.Tensor]) -> None:
        rows = torch.from_numpy(np.concatenate([task.rows for task in tasks])).long()
        if self._device.type == "cuda":  # pinned: other copies to the device wait for the stream
            rows = rows.pin_memory().to(self._device, non_blocking=True)
        self._kept.index_copy_(0, rows, torch.cat(list(made)))
        self._launched = tasks[-1].ticket


def grouped(tasks: Sequence[EncoderTask], most: int | None) -> Iterator[list[EncoderTask]]:
    """Neighbours with up to `most` patches, or one task with more. None: all."""
    group, patches = list[EncoderTask](), 0
    for task in tasks:
        if group and most is not None and patches + len(task.input.patches) > most:
            yield group
            group, patches = [], 0
        group.append(task)
        patches += len(task.input.patches)
    if group:
        yield group
