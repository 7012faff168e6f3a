"""Operations: a plain-torch reference and its other implementations."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from hybridrt.kernels.core.providers import By as By
from hybridrt.kernels.core.providers import register, select

P = ParamSpec("P")
R = TypeVar("R")


class Operation(Generic[P, R]):
    """A function with several implementations of one signature.

    A call goes to the one that `providers.select` picks for the device of the first argument: a
    tensor, or a record that begins with one. `reference` is the plain-torch implementation.
    """

    def __init__(self, reference: Callable[P, R], check: Callable[..., None] | None) -> None:
        self.name, self.reference = reference.__name__, reference
        self._check = check
        functools.update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._check is not None:
            self._check(*args, **kwargs)
        first: Any = args[0] if args else next(iter(kwargs.values()))
        tensor = first if isinstance(first, Tensor) else first[0]
        return select(self.name, tensor.device.type)(*args, **kwargs)

    def for_device(self, device: torch.device, *, checked: bool = False) -> Callable[P, R]:
        """The implementation for a device: a layer that keeps it looks nothing up in its calls.
        The operation itself on "meta", where nothing runs, or if a check goes first and the caller has
        not made it (`checked`)."""
        looks = device.type == "meta" or (self._check is not None and not checked)
        return self if looks else select(self.name, device.type)


def operation(*others: By, check: Callable[..., None] | None = None) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Makes a plain-torch reference an operation.

    Args:
        others: further implementations with the reference's arguments.
        check: called first with the arguments; raises if they do not fit together. It names those
            that it reads and accepts others as `*_` and `**_`.
    """

    def decorate(reference: Callable[P, R]) -> Operation[P, R]:
        module, name = reference.__module__, reference.__name__
        register(name, By("torch", f"{module}:{name}.reference", priority=0))
        for other in others:
            library = f"hybridrt.kernels.libraries.{other.provider}:{name}"
            usual = f"{module}_triton:{name}_triton" if other.provider == "triton" else library
            register(name, replace(other, target=other.target or usual))
        return Operation(reference, check)

    return decorate
