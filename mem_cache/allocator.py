"""Who owns which entry of a pool: host integers with generations. Serves request rows, state slots and KV pages."""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple, NoReturn

from hybridrt.errors import OutOfSlotsError, PoolError

_FREE, _USED, _CACHED = range(3)
_NAMES = ("free", "used by a request", "owned by the cache")


class Slot(NamedTuple):
    """One tenancy of a pool entry. The entry's generation moves on when it is freed, so an old handle is recognised."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which has no use here
    generation: int


_slot = partial(tuple.__new__, Slot)  # Slot._make, at half its time


class SlotAllocator:
    """Hands out the indices [reserved, reserved + num_slots) of a pool; those below `reserved` are scratch for padding.

    Every entry is free, used by one request, or owned by the cache, and free + used + cached == total always holds.
    Requests that read an entry of the cache lock it; locks count, and a locked entry stays the cache's.
    Entries are reused last in, first out. Each method checks everything it was given before it changes anything.

    Args:
        num_slots: entries that can be handed out.
        what: name of one entry, for error messages ("KV page").
        reserved: indices never handed out.
    """

    def __init__(self, num_slots: int, what: str, reserved: int = 1) -> None:
        end = reserved + num_slots
        self.total = num_slots
        self._what = what
        self._reserved = reserved
        self._state = bytearray(end)
        self._generation = [0] * end
        self._handles: list[Slot | None] = [None] * end  # of entries that are not free
        self._locks = [0] * end
        self._free = list(range(end - 1, reserved - 1, -1))
        self._num_cached = self._num_locked = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_locked(self) -> int:
        return self._num_locked

    @property
    def num_used(self) -> int:
        return self.total - len(self._free) - self._num_cached

    def alloc(self, n: int) -> list[Slot]:
        """Takes n entries.

        Raises:
            OutOfSlotsError: fewer than n are free; nothing was taken.
        """
        start = len(self._free) - n
        if start < 0:
            raise OutOfSlotsError(f"{n} x {self._what} wanted, {len(self._free)} of {self.total} free")
        indices = self._free[start:]
        indices.reverse()
        del self._free[start:]
        slots = [_slot((i, self._generation[i])) for i in indices]
        state, handles = self._state, self._handles
        for i, slot in zip(indices, slots):
            state[i], handles[i] = _USED, slot
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Gives entries of requests back.

        Raises:
            PoolError: an entry is not used by a request, or its handle is stale; nothing was freed.
        """
        indices = self._checked(slots, _USED)
        self._mark(indices, _FREE)
        self._give_back(indices)

    def _give_back(self, indices: Sequence[int]) -> None:
        generation, handles = self._generation, self._handles
        for index in indices:
            generation[index] += 1
            handles[index] = None
        self._free += indices[::-1]

    def to_cache(self, slots: Sequence[Slot]) -> None:
        """Entries of requests become the cache's; the handles stay valid. PoolError as in `free`."""
        self._mark(self._checked(slots, _USED), _CACHED)
        self._num_cached += len(slots)

    def evict(self, slots: Sequence[Slot]) -> None:
        """Frees entries of the cache. PoolError if they are not the cache's, or locked; nothing was freed."""
        indices = self._checked(slots, _CACHED)
        if any(map(self._locks.__getitem__, indices)):
            locked = next(index for index in indices if self._locks[index])
            raise PoolError(f"the cache gives up {self._what} {locked}, which a running request has locked")
        self._mark(indices, _FREE)
        self._num_cached -= len(indices)
        self._give_back(indices)

    def lock(self, slots: Sequence[Slot]) -> None:
        """Keeps entries of the cache from being evicted until `unlock`. PoolError if they are not the cache's."""
        indices, locks = self._checked(slots, _CACHED), self._locks
        for index in indices:
            self._num_locked += not locks[index]
            locks[index] += 1

    def unlock(self, slots: Sequence[Slot]) -> None:
        """Takes one lock off each entry. PoolError if one is not locked; nothing has changed."""
        indices, locks = self._checked(slots, _CACHED), self._locks
        if not all(map(locks.__getitem__, indices)):
            raise PoolError(f"{self._what} {next(index for index in indices if not locks[index])} is not locked")
        for index in indices:
            locks[index] -= 1
            self._num_locked -= not locks[index]

    def reclaim(self) -> None:
        """Frees every entry of every owner: after a call that was broken off, no ledger is right."""
        places = range(self._reserved, len(self._state))
        self._state[self._reserved :] = bytes(len(places))
        self._generation = [generation + 1 for generation in self._generation]
        self._handles = [None] * len(self._handles)
        self._locks = [0] * len(self._locks)
        self._free = list(reversed(places))
        self._num_cached = self._num_locked = 0

    def check(self) -> None:
        """Raises PoolError unless free + used + cached == total, each entry in exactly one of the three."""
        counts = [self._state.count(state, self._reserved) for state in (_FREE, _USED, _CACHED)]
        if counts != [self.num_free, self.num_used, self.num_cached]:
            raise PoolError(f"{self._what}: {counts} are free, used, cached, but the counters say {self!r}")
        if len(set(self._free)) != len(self._free) or any(self._state[i] != _FREE for i in self._free):
            raise PoolError(f"the free list of {self._what} holds an entry twice or one that is in use: {self!r}")
        if self._num_locked != len(self._locks) - self._locks.count(0):
            raise PoolError(f"{self._num_locked} of {self._what} are said to be locked: {self!r}")
        if any(locks and state != _CACHED for locks, state in zip(self._locks, self._state, strict=True)):
            raise PoolError(f"an entry of {self._what} is locked, but not the cache's: {self!r}")

    def __repr__(self) -> str:
        return (
            f"SlotAllocator({self._what!r}: {self.num_free} free + {self.num_used} used + {self.num_cached} cached "
            f"of {self.total})"
        )

    def _mark(self, indices: Sequence[int], target: int) -> None:
        state = self._state
        for index in indices:
            state[index] = target

    def _checked(self, slots: Sequence[Slot], source: int) -> Sequence[int]:
        """The indices of entries that are as `source` says. Long prompts have thousands of them, so each check is one
        call for all; what is wrong is looked for only once something is."""
        if not slots:
            return ()
        indices = [slot.index for slot in slots]
        of = itemgetter(*indices, 0)  # entry 0 beside: of one index alone it would give no tuple
        try:
            held = of(self._handles)[:-1] == tuple(slots)
        except IndexError:
            held = False
        right = held and of(self._state)[:-1].count(source) == len(slots)
        if not right or len(set(indices)) != len(slots):
            self._refuse(slots, source)
        return indices

    def _refuse(self, slots: Sequence[Slot], source: int) -> NoReturn:
        """Raises PoolError for the first entry that is wrong."""
        state, generation = self._state, self._generation
        for index, tenancy in slots:
            if not self._reserved <= index < len(state):
                raise PoolError(f"{self._what} {index} does not exist; valid are {self._reserved} to {len(state) - 1}")
            if generation[index] != tenancy:
                raise PoolError(f"stale handle of {self._what} {index}: it was freed and may belong to another request")
            if state[index] != source:
                raise PoolError(f"{self._what} {index} is {_NAMES[state[index]]}, not {_NAMES[source]}")
        raise PoolError(f"the same {self._what} twice in one call: {[slot.index for slot in slots]}")
