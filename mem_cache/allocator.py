"""Who owns which entry of a pool: host integers with generations. Serves request rows, state slots and KV pages."""

from collections.abc import Sequence
from typing import NamedTuple

from hybridrt.errors import OutOfSlotsError, PoolError

_FREE, _USED, _CACHED = range(3)
_NAMES = ("free", "used by a request", "owned by the cache")


class Slot(NamedTuple):
    """One tenancy of a pool entry. The entry's generation moves on when it is freed, so an old handle is recognised."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which has no use here
    generation: int


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
        for i in indices:
            self._state[i] = _USED
        return [Slot(i, self._generation[i]) for i in indices]

    def free(self, slots: Sequence[Slot]) -> None:
        """Gives entries of requests back.

        Raises:
            PoolError: an entry is not used by a request, or its handle is stale; nothing was freed.
        """
        self._move(slots, _USED, _FREE)
        self._give_back(slots)

    def _give_back(self, slots: Sequence[Slot]) -> None:
        for slot in reversed(slots):
            self._generation[slot.index] += 1
            self._free.append(slot.index)

    def to_cache(self, slots: Sequence[Slot]) -> None:
        """Entries of requests become the cache's; the handles stay valid. PoolError as in `free`."""
        self._move(slots, _USED, _CACHED)
        self._num_cached += len(slots)

    def evict(self, slots: Sequence[Slot]) -> None:
        """Frees entries of the cache. PoolError if they are not the cache's, or locked; nothing was freed."""
        self._check_all(slots, _CACHED)
        locked = [slot.index for slot in slots if self._locks[slot.index]]
        if locked:
            raise PoolError(f"the cache gives up {self._what} {locked[0]}, which a running request has locked")
        self._move(slots, _CACHED, _FREE)
        self._num_cached -= len(slots)
        self._give_back(slots)

    def lock(self, slots: Sequence[Slot]) -> None:
        """Keeps entries of the cache from being evicted until `unlock`. PoolError if they are not the cache's."""
        self._check_all(slots, _CACHED)
        for slot in slots:
            self._num_locked += not self._locks[slot.index]
            self._locks[slot.index] += 1

    def unlock(self, slots: Sequence[Slot]) -> None:
        """Takes one lock off each entry. PoolError if one is not locked; nothing has changed."""
        self._check_all(slots, _CACHED)
        loose = [slot.index for slot in slots if not self._locks[slot.index]]
        if loose:
            raise PoolError(f"{self._what} {loose[0]} is not locked")
        for slot in slots:
            self._locks[slot.index] -= 1
            self._num_locked -= not self._locks[slot.index]

    def reclaim(self) -> None:
        """Frees every entry of every owner: after a call that was broken off, no ledger is right."""
        places = range(self._reserved, len(self._state))
        self._state[self._reserved :] = bytes(len(places))
        self._generation = [generation + 1 for generation in self._generation]
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
        if any(locks and state != _CACHED for locks, state in zip(self._locks, self._state, strict=True)):
            raise PoolError(f"an entry of {self._what} is locked, but not the cache's: {self!r}")
        if sum(map(bool, self._locks)) != self._num_locked:
            raise PoolError(f"{self._num_locked} x {self._what} are counted as locked: {self._locks}")

    def __repr__(self) -> str:
        return (
            f"SlotAllocator({self._what!r}: {self.num_free} free + {self.num_used} used + {self.num_cached} cached "
            f"of {self.total})"
        )

    def _move(self, slots: Sequence[Slot], source: int, target: int) -> None:
        self._check_all(slots, source)
        for index, _ in slots:
            self._state[index] = target

    def _check_all(self, slots: Sequence[Slot], source: int) -> None:
        state, generation = self._state, self._generation
        for index, tenancy in slots:
            if not self._reserved <= index < len(state):
                raise PoolError(f"{self._what} {index} does not exist; valid are {self._reserved} to {len(state) - 1}")
            if generation[index] != tenancy:
                raise PoolError(f"stale handle of {self._what} {index}: it was freed and may belong to another request")
            if state[index] != source:
                raise PoolError(f"{self._what} {index} is {_NAMES[state[index]]}, not {_NAMES[source]}")
        if len({slot.index for slot in slots}) != len(slots):
            raise PoolError(f"the same {self._what} twice in one call: {[slot.index for slot in slots]}")
