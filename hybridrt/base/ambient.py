"""Keeps the caller's torch settings away from the engine: autocast, default device, grad mode.

The default dtype has no guard, because it belongs to the whole process. Instead every tensor of
hybridrt is made with an explicit dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

from hybridrt.base.device import gpu_started

P = ParamSpec("P")
R = TypeVar("R")
_DEVICE_TYPES = ("cpu", "cuda")


class _Nondeterministic:
    """Switches deterministic algorithms off while at least one thread is inside. The switch belongs
    to the process. On a GPU it makes libraries raise.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._found: bool | None = None  # None: nothing to put back

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if torch.are_deterministic_algorithms_enabled():
                self._found = torch.is_deterministic_algorithms_warn_only_enabled()
                torch.use_deterministic_algorithms(False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._found is not None:
                torch.use_deterministic_algorithms(True, warn_only=self._found)
                self._found = None


_NONDETERMINISTIC = _Nondeterministic()


def undisturbed() -> AbstractContextManager[None]:
    """A context in which this thread has torch's default state. The caller's state is restored
    afterwards."""
    # Faster than `torch.get_default_device`.
    usual = (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
        and not (torch.are_deterministic_algorithms_enabled() and gpu_started())
        and not torch._C._len_torch_function_stack()
    )
    return nullcontext() if usual else _as_usual()


@contextmanager
def _as_usual() -> Iterator[None]:
    with ExitStack() as stack:
        # First, because it sets grad mode. Tensors made here are used outside of it.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in _DEVICE_TYPES:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.device("cpu"))
        if gpu_started():
            stack.enter_context(_NONDETERMINISTIC)
        yield


def in_undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called within `undisturbed`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with undisturbed():
            return function(*args, **kwargs)

    return call
