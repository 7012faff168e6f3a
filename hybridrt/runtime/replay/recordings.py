"""Which decode steps of one row on a CPU are recorded, and how many recordings are kept.

A step of the built-in model on one core takes 4.56 ms instead of 5.64 ms (cuda_graph=False). Steps
of more rows gained less than 5%, so they are not recorded. torch.compile splits the step at each
look at a number on the host, and takes longer than eager steps.

This file alone decides what varies between steps. Softmax attention, whose context grows, is called
again. A step is not recorded if it reads numbers on the host elsewhere (experts), or has a part
from another package, which may call libraries that PyTorch does not see.
"""

import logging
import os
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from hybridrt.attention.base import AttentionBackend, AttentionInputs
from hybridrt.base.forward_batch import AttentionBackendLike, ForwardBatch, RoutedLayer
from hybridrt.kernels.core.providers import ENVIRONMENT_VARIABLE
from hybridrt.models.base import CausalLM
from hybridrt.runtime.replay.recording import Recording, missing

logger = logging.getLogger(__name__)

RECORDS_AFTER = 8  # steps of one state slot, one after the other: recording takes as long as ten
MOST_BYTES = 64 << 20  # bytes of the tensors that recordings keep, outside of the memory plan
MOST_KEPT = 256  # recordings
KNOWN = ("hybridrt", "torch")  # packages whose parts are known to call operations of PyTorch alone


class Recordings:
    """Records steps that come again and again, and repeats them.

    While modules of the model have hooks, steps are neither recorded nor repeated: the hooks are
    called.

    Args:
        model: computes the steps.
        on: False records nothing.

    Attributes:
        problems: why steps cannot be repeated, each reason once; they run without a recording.
    """

    def __init__(self, model: CausalLM, on: bool) -> None:
        self._model = model
        self.problems: set[str] = set()
        if on and (problem := missing() or _unknown_part(model)) is not None:
            self._tell(problem)
        self._on = on and not self.problems
        self._kept: dict[int, tuple[Recording, Tensor] | None] = {}  # None: it cannot be repeated
        self._last: int | None = None
        self._times = 0
        own = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks = [*own, modules._global_forward_pre_hooks, modules._global_forward_hooks]

    def run(self, state_slot: int | None, batch: ForwardBatch) -> Tensor:
        """Logits of a prepared step, by the model or by a repetition. Steps of the same
        `state_slot`, except None, are the same operations on the same tensors, except for softmax
        attention."""
        kept = self._kept.get(state_slot) if state_slot is not None else None
        if kept is not None and not any(self._hooks):
            recording, result = kept
            recording.repeat()
            return result
        if state_slot is None or not self._is_time(state_slot):
            return self._model.logits(self._model(batch))
        return self._record(state_slot, batch)

    def _is_time(self, state_slot: int) -> bool:
        if not self._on or state_slot in self._kept or any(self._hooks):
            return False
        self._times = self._times + 1 if state_slot == self._last else 1
        self._last = state_slot
        return self._times >= RECORDS_AFTER

    def _record(self, state_slot: int, batch: ForwardBatch) -> Tensor:
        recording, backend = Recording(MOST_BYTES), batch.attn_backend
        batch.attn_backend = _AttentionAgain(backend, recording)
        try:
            with recording:
                result = self._model.logits(self._model(batch))
        finally:
            batch.attn_backend = backend
        problem = recording.problem
        self._make_room(recording.bytes if problem is None else 0)
        if problem is not None:
            self._tell(problem)
        self._kept[state_slot] = (recording, result) if problem is None else None
        return result

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            logger.info("decode steps run without a recording: %s", problem)
            self.problems.add(problem)

    def _make_room(self, needed: int) -> None:
        sizes = {state_slot: kept[0].bytes if kept else 0 for state_slot, kept in self._kept.items()}
        taken = sum(sizes.values()) + needed
        for state_slot, size in sizes.items():
            if taken <= MOST_BYTES and len(self._kept) < MOST_KEPT:
                return
            del self._kept[state_slot]
            taken -= size


class _AttentionAgain:
    """The backend of a recorded step: repetitions call softmax attention again."""

    def __init__(self, backend: AttentionBackendLike, recording: Recording) -> None:
        self._backend, self._recording = backend, recording

    @property
    def linear_attn_backend(self) -> Any:
        return self._backend.linear_attn_backend

    def route(self, layer: RoutedLayer) -> AttentionBackend:
        found: AttentionBackend = self._backend.route(layer)
        return found

    def run(self, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        call = partial(self._backend.run, layer, batch, inputs, out)
        return self._recording.call_again(call) if isinstance(inputs, AttentionInputs) else call()


def _unknown_part(model: nn.Module) -> str | None:
    """Why the steps of a model are not recorded; None if they are."""
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return f"{ENVIRONMENT_VARIABLE} may choose kernels that are no operations of PyTorch"
    for part in model.modules():
        for each in (part, getattr(part, "method", None) or part):
            if type(each).__module__.partition(".")[0] not in KNOWN:
                return f"{type(each).__qualname__} is not part of hybridrt"
            if type(each).__module__.startswith("hybridrt.layers.quant."):
                return "a recording would keep what quantised weights are decoded to"
    return None
