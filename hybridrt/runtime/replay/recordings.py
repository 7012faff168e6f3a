"""Decides which decode steps on a CPU are recorded, and repeats them.

CPU milliseconds a step with and without (cuda_graph=False), built-in model, one core: 3.0 and 4.3
with one row, 9.0 and 9.8 with 8 rows, the same with 32.
"""

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules import module as modules

from hybridrt.kernels.core.recording import Recording, missing

logger = logging.getLogger(__name__)

RECORDS_AFTER = 8  # steps of one key in a row: recording takes as long as ten
MOST_BYTES = 64 << 20  # bytes of the tensors that recordings keep, outside of the memory plan
MOST_KEPT = 256


class Recordings:
    """Records steps that come again and again, and repeats them.

    While modules of the model have hooks, steps are neither recorded nor repeated: the hooks are
    called.

    Args:
        on: False records nothing.

    Attributes:
        problems: why steps cannot be repeated, each reason once; they run without a recording.
    """

    def __init__(self, model: nn.Module, on: bool) -> None:
        self.problems: set[str] = set()
        if on and (problem := missing()) is not None:
            self._tell(problem)
        self._on = on and not self.problems
        self._kept: dict[Hashable, tuple[Recording, Tensor] | None] = {}  # None: it cannot be repeated
        self._last: Hashable = None
        self._times = 0
        own = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks = [*own, modules._global_forward_pre_hooks, modules._global_forward_hooks]

    def repeat(self, key: Hashable) -> Tensor | None:
        """Repeats the step of a key; None without a recording. Steps of equal keys, except None,
        are the same operations on the same tensors."""
        kept = self._kept.get(key)
        if kept is None or any(self._hooks):
            return None
        recording, result = kept
        recording.repeat()
        return result

    @contextmanager
    def around(self, key: Hashable) -> Iterator[list[Tensor]]:
        """Runs a step that has no recording, and records it if it is time. The step appends its
        result."""
        results: list[Tensor] = []
        if not self._is_time(key):
            yield results
            return
        recording = Recording(MOST_BYTES)
        with recording.record():
            yield results
        self._keep(key, recording, results[0])

    def _is_time(self, key: Hashable) -> bool:
        if key is None or not self._on or key in self._kept or any(self._hooks):
            return False
        self._times = self._times + 1 if key == self._last else 1
        self._last = key
        return self._times >= RECORDS_AFTER

    def _keep(self, key: Hashable, recording: Recording, result: Tensor) -> None:
        problem = recording.problem
        self._make_room(recording.bytes if problem is None else 0)
        if problem is not None:
            self._tell(problem)
        self._kept[key] = (recording, result) if problem is None else None

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            logger.info("decode steps run without a recording: %s", problem)
            self.problems.add(problem)

    def _make_room(self, needed: int) -> None:
        sizes = {key: 0 if kept is None else kept[0].bytes for key, kept in self._kept.items()}
        taken = sum(sizes.values()) + needed
        for key, size in sizes.items():
            if taken <= MOST_BYTES and len(self._kept) < MOST_KEPT:
                return
            del self._kept[key]
            taken -= size
