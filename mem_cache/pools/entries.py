"""Handles of pool entries, and the ledger of who owns which entry, on the host."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar, overload

import numpy as np

from hybridrt.base.errors import OutOfSlotsError, PoolError

_BITS = 32
_INDEX = (1 << _BITS) - 1
_NONE = np.empty(0, np.int64)
GENERATION = 1 << _BITS  # to the handle of the next tenancy


class Handle(int):
    """One tenancy of a pool entry: index and generation in one integer. The generation grows when
    the entry is freed, so an old handle is recognised.
    """

    __slots__ = ()

    def __new__(cls, index: int, generation: int) -> "Handle":
        return int.__new__(cls, generation << _BITS | index)

    @property
    def index(self) -> int:
        return self & _INDEX

    @property
    def generation(self) -> int:
        return self >> _BITS

    def __repr__(self) -> str:
        return f"Handle({self.index}, {self.generation})"


handle_of = partial(int.__new__, Handle)  # of an integer that is one


class Handles(Sequence[Handle]):
    """A list of handles as one array, so that tens of thousands cost little. A slice is a copy.

    Args:
        parts: sequences of handles, which are joined.
    """

    __slots__ = ("_keys", "_size")

    def __init__(self, *parts: Sequence[Handle]) -> None:
        self._keys = np.concatenate([keys_of(part) for part in parts]) if parts else _NONE
        self._size = len(self._keys)

    @classmethod
    def of_keys(cls, keys: np.ndarray) -> "Handles":
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

    def at(self, mask: np.ndarray) -> "Handles":
        """The handles where `mask` [n] bool is True."""
        return Handles.of_keys(self.keys[mask])

    def extend(self, handles: Sequence[Handle]) -> None:
        keys = keys_of(handles)
        end = self._size + len(keys)
        if end > len(self._keys):
            room = np.empty(max(end, 2 * self._size), np.int64)
            room[: self._size] = self.keys
            self._keys = room
        self._keys[self._size : end] = keys
        self._size = end

    def append(self, handle: Handle) -> None:
        self.extend((handle,))

    def cut(self, count: int) -> "Handles":
        """Takes the last `count` handles off, and returns them."""
        taken = self[self._size - count :]
        self._size -= count
        return taken

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Handle]:
        return map(handle_of, self.keys.tolist())

    @overload
    def __getitem__(self, place: int) -> Handle: ...
    @overload
    def __getitem__(self, place: slice) -> "Handles": ...
    def __getitem__(self, place: int | slice) -> "Handle | Handles":
        found = self.keys[place]
        return Handles.of_keys(found.copy()) if isinstance(place, slice) else handle_of(int(found))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # a list

    def __repr__(self) -> str:
        return f"Handles({list(self)})"


def keys_of(handles: Sequence[Handle]) -> np.ndarray:
    """[n] int64 handles."""
    return handles.keys if type(handles) is Handles else np.array(handles, np.int64)


def indices_of(keys: np.ndarray) -> np.ndarray:
    """[n] int64 indices of entries from their handles."""
    return keys & _INDEX


FREE, USED, CACHED = range(3)
_NOTHING = np.empty(0, np.bool_)
Number = TypeVar("Number", int, np.ndarray)
_NAMES = ("free", "used by a request", "owned by the cache")


class EntryAllocator:
    """Hands out the indices 1 to num_entries of a pool. Index 0 is scratch for padding.

    Every entry is free, used by one request, or owned by the cache: free + used + cached == total.
    Requests lock entries of the cache that they read; locks count. Entries are reused last in,
    first out. Each method checks all its arguments before it changes anything.

    Args:
        num_entries: entries that can be handed out.
        what: name of one entry, for error messages ("KV page").

    Attributes:
        total, num_free, num_cached: numbers of entries.
        num_locked: entries of the cache that are locked.
    """

    _gap = 0  # numbers after each part of the pool that no entry has

    def __init__(self, num_entries: int, what: str) -> None:
        self.total = num_entries
        self._what = what
        self._make_entries(np.arange(1 + num_entries), 1)
        self._free = np.arange(num_entries, 0, -1)  # its first `num_free` are free
        self.num_free = num_entries

    def _make_entries(self, numbers: np.ndarray, scratch: int) -> None:
        """`numbers` [n] int64 of the entries in their pool; nobody has the first `scratch`."""
        self._state = np.zeros(len(numbers), np.uint8)
        self._handles = numbers  # of free entries: the handle of the next tenancy
        self._handles[:scratch] = -1
        self._locks = np.zeros(len(numbers), np.int32)
        self._places = np.empty(len(numbers), np.int32)  # of entries among the arguments of a call
        self.num_cached, self.num_locked = 0, 0

    @property
    def num_used(self) -> int:
        return self.total - self.num_free - self.num_cached

    @property
    def most_free(self) -> int:
        """Entries that could be taken now."""
        return self.num_free

    def alloc(self, n: int) -> Handles:
        """Takes n entries.

        Raises:
            OutOfSlotsError: fewer than n are free; nothing was taken.
        """
        self.check_free(n)
        indices = self._take_free(n)
        self._state[indices] = USED
        return Handles.of_keys(self._handles[indices])

    def alloc_one(self) -> Handle:
        """`alloc` of one entry, without arrays of handles: each request needs a row and a state handle."""
        self.check_free(1)
        index = self._take_one()
        self._state[index] = USED
        return handle_of(self._handles.item(index))

    def free(self, handles: Sequence[Handle]) -> None:
        """Frees entries of requests.

        Raises:
            PoolError: an entry is not used by a request, or its handle is stale; nothing was freed.
        """
        if len(handles) == 1 and (index := self._find(handles[0], USED)):  # fast path: rows, state slots
            self._state[index] = FREE
            self._handles[index] += GENERATION
            self._add_one(index)
        elif len(handles):
            self._give_back(self._checked(handles, USED), used=True)

    def free_used(self, handles: Sequence[Handle]) -> np.ndarray:
        """Frees those entries that requests use. Returns the mask of these, [n] bool; the others
        are the cache's. PoolError if a handle is stale.
        """
        indices = self._indices(handles)
        used: np.ndarray = self._state[indices] == USED
        self._give_back(self._once(indices[used]), used=True)
        return used

    def are_used(self, handles: Sequence[Handle]) -> np.ndarray:
        """[n] bool: which entries are used by requests; the others are the cache's. PoolError if a
        handle is stale."""
        if not len(handles):
            return _NOTHING
        used: np.ndarray = self._state[self._indices(handles)] == USED
        return used

    def are_idle(self, keys: np.ndarray) -> np.ndarray:
        """[n] bool: which entries of the cache no request has locked. `keys`: [n] int64 handles."""
        idle: np.ndarray = self._locks[self._index(indices_of(keys))] == 0
        return idle

    def to_cache(self, handles: Sequence[Handle]) -> None:
        """Makes the cache the owner of requests' entries. The handles stay valid. PoolError as in
        `free`.
        """
        if not len(handles):
            return
        self._state[indices := self._checked(handles, USED)] = CACHED
        self.num_cached += len(handles)
        self._note_busy(indices, -1)

    def evict(self, handles: Sequence[Handle]) -> None:
        """Frees entries of the cache. PoolError if one is not the cache's, or is locked; nothing
        was freed.
        """
        if not len(handles):
            return
        self._check_idle(indices := self._checked(handles, CACHED))
        self.num_cached -= len(indices)
        self._give_back(indices, used=False)

    def lend_cached(self, handle: Handle) -> Handle:
        """An entry of the cache goes to a request. It is not free in between: others cannot get it. Returns
        its new handle. PoolError as in `evict`."""
        self._check_idle(index := self._checked([handle], CACHED))
        self._state[index] = USED
        self._handles[index] += GENERATION
        self.num_cached -= 1
        self._note_busy(index, 1)
        return handle_of(self._handles.item(index.item()))

    def lock(self, handles: Sequence[Handle]) -> None:
        """Keeps entries of the cache from eviction. PoolError if one is not the cache's."""
        if not len(handles):
            return
        indices = self._checked(handles, CACHED)
        locks = self._locks[indices]
        fresh = indices[locks == 0]
        self.num_locked += len(fresh)
        self._locks[indices] = locks + 1
        self._note_busy(fresh, 1)

    def unlock(self, handles: Sequence[Handle]) -> None:
        """Takes one lock off each entry. PoolError if one is not locked; nothing has changed."""
        if not len(handles):
            return
        indices = self._checked(handles, CACHED)
        locks = self._locks[indices]
        if np.count_nonzero(locks) < len(locks):
            raise PoolError(f"{self._what} {self._number(indices[locks.argmin()])} is not locked")
        idle = indices[locks == 1]
        self._locks[indices] = locks - 1
        self.num_locked -= len(idle)
        self._note_busy(idle, -1)

    def reclaim(self) -> None:
        """Frees every entry of every owner. After an interrupted call no ledger is right."""
        self._state[:] = FREE
        self._handles += GENERATION
        self._locks[:] = 0
        self.num_cached, self.num_locked = 0, 0
        self._free_all()

    def check(self) -> None:
        """Raises PoolError unless each entry is exactly one of free, used and cached."""
        free, state = self._all_free(), self._state
        counts = [len(free), *[np.count_nonzero(state == each) for each in (USED, CACHED)]]
        if counts != [self.num_free, self.num_used, self.num_cached]:
            raise PoolError(f"{self._what}: {counts} are free, used, cached, but the counters say {self!r}")
        if (np.bincount(free) > 1).any() or self._state[free].any():
            raise PoolError(f"the free list of {self._what} holds an entry twice or one that is in use: {self!r}")
        if self.num_locked != np.count_nonzero(self._locks):
            raise PoolError(f"{self.num_locked} of {self._what} are said to be locked: {self!r}")
        if (self._state[self._locks > 0] != CACHED).any():
            raise PoolError(f"an entry of {self._what} is locked, but not the cache's: {self!r}")

    def __repr__(self) -> str:
        return (
            f"EntryAllocator({self._what!r}: {self.num_free} free + {self.num_used} used + {self.num_cached} cached "
            f"of {self.total})"
        )

    def _find(self, handle: Handle, source: int) -> int:
        """The entry's index; 0 if its handle or owner is wrong."""
        index = self._index(handle.index) if self._gap else handle.index
        right = index < len(self._handles) and self._handles.item(index) == handle and self._state.item(index) == source
        return index if right else 0

    def check_free(self, n: int) -> None:
        """OutOfSlotsError if fewer than n entries are free."""
        if n > self.num_free:
            raise OutOfSlotsError(f"{n} x {self._what} wanted, {self.num_free} of {self.total} free")

    def _check_idle(self, indices: np.ndarray) -> None:
        """PoolError if one of these entries of the cache is locked."""
        locks = self._locks[indices]
        if np.count_nonzero(locks):
            first = self._number(indices[locks.argmax()])
            raise PoolError(f"the cache gives up {self._what} {first}, which a running request has locked")

    def _note_busy(self, indices: np.ndarray, change: int) -> None:
        """For allocators that count what requests use or have locked: called for entries that become so (change 1) or
        cease to be so (-1) within the cache, by index. `_take_*` and `_add_*` count those that come from the free
        entries or go there."""

    def _give_back(self, indices: np.ndarray, used: bool) -> None:
        """Frees entries, which requests have `used`, or which the cache has evicted."""
        self._state[indices] = FREE
        self._handles[indices] += GENERATION
        self._add_free(indices, used)

    # -- the free entries, by index

    def _take_one(self) -> int:
        self.num_free -= 1
        return self._free.item(self.num_free)

    def _take_free(self, n: int) -> np.ndarray:
        self.num_free -= n
        return self._free[self.num_free : self.num_free + n][::-1]

    def _add_one(self, index: int) -> None:
        self._free[self.num_free] = index
        self.num_free += 1

    def _add_free(self, indices: np.ndarray, used: bool) -> None:
        end = self.num_free + len(indices)
        self._free[self.num_free : end] = indices[::-1]
        self.num_free = end

    def _free_all(self) -> None:
        self._free = np.arange(self.total, 0, -1)
        self.num_free = self.total

    def _all_free(self) -> np.ndarray:
        return self._free[: self.num_free]

    # -- the places of entries in the arrays, by their numbers in the pool

    def _index(self, number: Number) -> Number:
        return number

    def _number(self, index: np.ndarray) -> np.ndarray:
        return indices_of(self._handles[index])

    def _checked(self, handles: Sequence[Handle], source: int) -> np.ndarray:
        if len(handles) == 1 and (index := self._find(handles[0], source)):
            return np.array([index])
        indices = self._indices(handles)
        right = self._state[indices] == source
        if np.count_nonzero(right) < len(right):
            index = indices[right.argmin()]
            number = self._number(index)
            raise PoolError(f"{self._what} {number} is {_NAMES[self._state[index]]}, not {_NAMES[source]}")
        return self._once(indices)

    def _once(self, indices: np.ndarray) -> np.ndarray:
        if len(indices) > 1:
            self._places[indices] = places = np.arange(len(indices), dtype=np.int32)
            if np.count_nonzero(self._places[indices] != places):
                raise PoolError(f"the same {self._what} twice in one call: {self._number(indices).tolist()}")
        return indices

    def _indices(self, handles: Sequence[Handle]) -> np.ndarray:
        keys = keys_of(handles)
        numbers = indices_of(keys)
        indices = self._index(numbers) if self._gap else numbers
        try:
            right = self._handles[indices] == keys
        except IndexError:
            right = indices < len(self._handles)
        if np.count_nonzero(right) < len(right):
            wrong = right.argmin()
            index, number = indices[wrong], numbers[wrong]
            if index >= len(self._handles) or self._handles[index] < 0:
                raise PoolError(f"{self._what} {number} does not exist; {self._valid}")
            raise PoolError(f"stale handle of {self._what} {number}: it was freed and may belong to another request")
        return indices

    @property
    def _valid(self) -> str:
        return f"valid are 1 to {self.total}"
