"""Which decode steps on a CPU are recorded, and their repetition."""

from collections.abc import Callable, Hashable

from torch import Tensor, nn
from torch.nn.modules import module as modules

from hybridrt.kernels.recording import Recording

RECORDS_AFTER = 8  # steps of one key in a row: a recording takes as long as about eight steps
MOST_BYTES = 64 << 20  # of the tensors that recordings keep


class Recordings:
    """Steps that come again and again are recorded, and then repeated.

    Hooks of a module are called as long as there are some: such steps are neither recorded nor repeated.

    Attributes:
        problem: why no step is recorded any more; None if nothing is in the way.
    """

    def __init__(self, model: nn.Module) -> None:
        self.problem: str | None = None
        self._kept: dict[Hashable, tuple[Recording, Tensor]] = {}
        self._last: Hashable = None
        self._times = 0
        own = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks = [*own, modules._global_forward_pre_hooks, modules._global_forward_hooks]

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """step(), which with equal keys is the same operations on the same tensors; with None it may be any."""
        if key is None or any(self._hooks):
            return step()
        found = self._kept.get(key)
        if found is not None:
            recording, result = found
            recording.repeat()
            return result
        self._times = self._times + 1 if key == self._last else 1
        self._last = key
        return step() if self.problem or self._times < RECORDS_AFTER else self._record(key, step)

    def _record(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        recording = Recording()
        result = recording.record(step)
        self.problem = recording.problem
        if self.problem is None:
            self._kept[key] = recording, result
        return result
