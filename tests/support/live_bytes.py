"""Bytes of the tensors that exist while code runs."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that exist after each operation: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._live.setdefault(StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        self.count()
        return result

    def count(self) -> None:
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        self.now = sum(self._live.values())
        self.peak = max(self.peak, self.now)
