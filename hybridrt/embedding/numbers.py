"""A host engine's integers: arrays of any kind, and its own numbers of rows, state slots and pages.

The pools' scratch entry is 0. A host engine may choose another number; all others follow in order:
its numbers are the pools' plus a constant, modulo the number of entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from hybridrt.base.errors import BackendError, PoolError, shown
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan

Array = Sequence[int] | np.ndarray | torch.Tensor
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
Integers = TypeVar("Integers", int, np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class Scratch:
    """The host engine's scratch row, state slot and page (of each page group), which no request may
    have. -1: the last."""

    row: int = -1
    state_slot: int = -1
    page: int = -1

    def __post_init__(self) -> None:
        for name in ("row", "state_slot", "page"):
            if type(getattr(self, name)) is not int:
                raise PoolError(f"the scratch {name} is {shown(getattr(self, name))}; pass an integer")


@dataclass(frozen=True)
class Places:
    """Numbers of the entries of one table.

    Attributes:
        count: entries, the scratch entry included: the host engine's numbers are 0 to count - 1.
        scratch: the host engine's number of the first scratch entry, 0 for the pools.
    """

    count: int
    scratch: int

    def inside(self, numbers: Integers) -> Integers:
        """Converts the host engine's numbers to the pools', on any device, without a wait."""
        return (numbers - self.scratch) % self.count

    def outside(self, numbers: Integers) -> Integers:
        """Inverse of `inside`."""
        return (numbers + self.scratch) % self.count

    def all(self, name: str, numbers: Array) -> np.ndarray:
        """`inside` of an array, scratch allowed: [n] int32. PoolError for a number outside the
        table."""
        given = host_integers(name, numbers)
        wrong = given[(given < 0) | (given >= self.count)]
        if len(wrong):
            raise PoolError(f"{name} holds {wrong[0]}; valid are 0 to {self.count - 1}, and {self.scratch} is scratch")
        return self.inside(given)

    def real(self, name: str, numbers: Array) -> np.ndarray:
        """Like `all`, and refuses scratch."""
        found = self.all(name, numbers)
        if not found.all():
            raise PoolError(f"{name} holds {self.scratch}, which is scratch: padding uses it, no request may")
        return found

    def own(self, name: str, numbers: Array) -> np.ndarray:
        """`real`, and each entry once: PoolError if one is there twice."""
        found = self.real(name, numbers)
        self.check_once(name, found)
        return found

    def check_once(self, name: str, inside: np.ndarray) -> None:
        """PoolError if an entry is there twice. `inside`: the pools' numbers."""
        unique, counts = np.unique(inside, return_counts=True)
        if len(unique) < len(inside):
            twice = self.outside(int(unique[counts > 1][0]))
            raise PoolError(f"{name} holds {twice} twice: no two requests share one")


@dataclass(frozen=True)
class Numbers:
    """A host engine's numbers of all tables.

    Attributes:
        pages: of each page group; one without attention layers.
        tokens: KV places of each page group: page * page_size + offset.
    """

    rows: Places
    state_slots: Places
    pages: tuple[Places, ...]
    tokens: tuple[Places, ...]

    @classmethod
    def from_plan(cls, plan: MemoryPlan, scratch: Scratch) -> "Numbers":
        """PoolError if a scratch entry is outside its table."""
        totals = [group.num_pages for group in plan.groups] or [0]
        pages = tuple(_places("page", total, scratch.page) for total in totals)
        tokens = tuple(Places(group.count * plan.page_size, group.scratch * plan.page_size) for group in pages)
        rows, state_slots = (
            _places("row", plan.num_rows, scratch.row),
            _places("state slot", plan.num_slots, scratch.state_slot),
        )
        return cls(rows, state_slots, pages, tokens)


def _places(what: str, real: int, scratch: int) -> Places:
    if not -real - 1 <= scratch <= real:
        raise PoolError(
            f"the scratch {what} is {scratch}; the table has {real} in addition: 0 to {real}, or -1, the last"
        )
    return Places(real + 1, scratch % (real + 1))


def host_integers(name: str, values: Array) -> np.ndarray:
    """[n] int32 of a list, a numpy array or a CPU tensor.

    Raises:
        BackendError: it is something else, on a device, has other dimensions, no integers, or
            larger ones than int32.
    """
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise BackendError(f"{name} is on {values.device}; a step is planned on the host: pass host integers")
        if values.layout != torch.strided or values.dtype not in _INTEGERS:
            raise BackendError(f"{name} has dtype {values.dtype} and layout {values.layout}; it must hold integers")
        values = values.numpy()
    try:
        found = np.asarray(values)
    except ValueError as e:  # lists of lists of different lengths
        raise BackendError(f"{name} is no array of integers: {e}") from e
    if found.ndim != 1:
        raise BackendError(f"{name} has {found.ndim} dimensions; it must have one")
    if not len(found):
        return np.empty(0, np.int32)
    if found.dtype.kind not in "iu":
        raise BackendError(f"{name} has dtype {found.dtype}; it must hold integers")
    if found.min() < -(2**31) or found.max() >= 2**31:
        raise BackendError(f"{name} holds a number that int32 does not: pass numbers below 2**31")
    return found.astype(np.int32)


def check_equal(name: str, first: np.ndarray, other: str, second: np.ndarray) -> None:
    """BackendError unless both have as many entries."""
    if len(first) != len(second):
        raise BackendError(f"{name} has {len(first)} entries and {other} {len(second)}; they belong together")


def check_within(name: str, values: np.ndarray, end: int) -> None:
    """BackendError unless all values are in [0, end)."""
    wrong = np.flatnonzero((values < 0) | (values >= end))
    if len(wrong):
        raise BackendError(f"{name}[{wrong[0]}] is {values[wrong[0]]}; valid are 0 to {end - 1}")


def check_on_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """BackendError unless it is a tensor of int32 or int64 on the device."""
    if not isinstance(tensor, torch.Tensor) or tensor.device != device:
        raise BackendError(f"{name} must be a tensor on {device}")
    if tensor.layout != torch.strided or tensor.dtype not in (torch.int32, torch.int64):
        raise BackendError(
            f"{name} has dtype {tensor.dtype} and layout {tensor.layout}; it must be dense, int32 or int64"
        )
