"""Runs the encoder of a model that sees: embeddings of spans, in a cache on the device."""

from collections.abc import Sequence

import numpy as np
import torch

from hybridrt.base.device import Event, SideStream, record_event, wait_in_stream
from hybridrt.base.forward_batch import Embeddings
from hybridrt.models.base import CausalLM
from hybridrt.runtime.step.pack import EmbeddedTokens
from hybridrt.runtime.step.plan import EncoderTask


class SpanEncoder:
    """The embedding cache [num_rows, hidden], and tasks that fill its rows.

    Tasks run in order, on a stream that starts after the steps launched before them. A step waits
    for them only if `StepPlan.after_encoder` names them.
    """

    def __init__(self, model: CausalLM, num_rows: int, device: torch.device) -> None:
        self._model, self._device = model, device
        self._kept = torch.zeros(num_rows, model.config.hidden_size, dtype=model.dtype, device=device)
        self._side = SideStream(device)
        self._running: dict[int, Event] = {}  # by the last ticket of each launch, those that may not have ended

    def launch(self, tasks: Sequence[EncoderTask]) -> None:
        """Queues tasks, in order of their tickets. All spans are encoded together."""
        with self._side.after_current():
            made = torch.cat(self._model.encode([task.input for task in tasks]))
            rows = torch.from_numpy(np.concatenate([task.rows for task in tasks])).long()
            if self._device.type == "cuda":  # pinned: other copies to the device wait for the stream
                rows = rows.pin_memory().to(self._device, non_blocking=True)
            self._kept.index_copy_(0, rows, made)
            self._running[tasks[-1].ticket] = record_event(self._device)

    def wait(self, ticket: int) -> None:
        """Makes the current stream wait for the tasks up to `ticket`. The host does not wait."""
        found = [last for last in self._running if last >= ticket]
        if found and not self.encoded(ticket):
            wait_in_stream(self._running[min(found)], self._device)

    def encoded(self, ticket: int) -> bool:
        """Whether a launched task has ended."""
        found = [last for last in self._running if last >= ticket]
        if found and not self._running[min(found)].query():
            return False
        for last in [last for last in self._running if last <= min(found, default=ticket)]:
            del self._running[last]  # tasks run in order
        return True

    def embeddings(self, tokens: EmbeddedTokens[torch.Tensor]) -> Embeddings:
        return Embeddings(self._kept.index_select(0, tokens.rows), tokens.places)
