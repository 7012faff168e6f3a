"""Handles of pool entries, and arrays of handles."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

import numpy as np

_BITS = 32
_INDEX = (1 << _BITS) - 1
_NONE = np.empty(0, np.int64)
GENERATION = 1 << _BITS  # from a handle to that of the entry's next tenancy


class Slot(int):
    """One tenancy of a pool entry: index and generation in one integer. The generation grows when
    the entry is freed, so an old handle is recognised.
    """

    __slots__ = ()

    def __new__(cls, index: int, generation: int) -> "Slot":
        return int.__new__(cls, generation << _BITS | index)

    @property
    def index(self) -> int:
        return self & _INDEX

    @property
    def generation(self) -> int:
        return self >> _BITS

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.generation})"


slot_of = partial(int.__new__, Slot)  # from an integer that is a handle already


class Slots(Sequence[Slot]):
    """A list of handles as one array, so that tens of thousands cost little. A slice is a copy.

    Args:
        parts: sequences of handles, which are joined.
    """

    __slots__ = ("_keys", "_size")

    def __init__(self, *parts: Sequence[Slot]) -> None:
        self._keys = np.concatenate([keys_of(part) for part in parts]) if parts else _NONE
        self._size = len(self._keys)

    @classmethod
    def of_keys(cls, keys: np.ndarray) -> "Slots":
        """The list that owns `keys` [n] int64."""
        made = cls.__new__(cls)
        made._keys, made._size = keys, len(keys)
        return made

    @property
    def keys(self) -> np.ndarray:
        """[n] int64 handles. A view: read it before the list changes."""
        return self._keys[: self._size]

    @property
    def indices(self) -> np.ndarray:
        """[n] int32 indices of the entries."""
        return indices_of(self.keys).astype(np.int32)

    def at(self, mask: np.ndarray) -> "Slots":
        return Slots.of_keys(self.keys[mask])

    def extend(self, slots: Sequence[Slot]) -> None:
        keys = keys_of(slots)
        end = self._size + len(keys)
        if end > len(self._keys):
            room = np.empty(max(end, 2 * self._size), np.int64)
            room[: self._size] = self.keys
            self._keys = room
        self._keys[self._size : end] = keys
        self._size = end

    def append(self, slot: Slot) -> None:
        self.extend((slot,))

    def cut(self, count: int) -> "Slots":
        taken = self[self._size - count :]
        self._size -= count
        return taken

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Slot]:
        return map(slot_of, self.keys.tolist())

    @overload
    def __getitem__(self, place: int) -> Slot: ...
    @overload
    def __getitem__(self, place: slice) -> "Slots": ...
    def __getitem__(self, place: int | slice) -> "Slot | Slots":
        found = self.keys[place]
        return Slots.of_keys(found.copy()) if isinstance(place, slice) else slot_of(int(found))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a list

    def __repr__(self) -> str:
        return f"Slots({list(self)})"


def keys_of(slots: Sequence[Slot]) -> np.ndarray:
    """[n] int64 handles."""
    return slots.keys if type(slots) is Slots else np.array(slots, np.int64)


def indices_of(keys: np.ndarray) -> np.ndarray:
    """[n] int64 indices of entries from their handles."""
    return keys & _INDEX
