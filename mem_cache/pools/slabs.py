"""Slabs: equal parts of one memory that pools share, and the ledgers of their owners.

A slab belongs to one pool at a time, which fills it with entries. It is free when all of these are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrt.base.errors import OutOfSlotsError, PoolError
from hybridrt.mem_cache.pools.entries import FREE, USED, EntryAllocator, Number


@dataclass(frozen=True)
class SlabShare:
    """How a pool sees slabs. Entry i of slab s has the number s * apart + i.

    Attributes:
        per_slab: entries of a slab.
        apart: from the first number of a slab to that of the next one.
    """

    per_slab: int
    apart: int

    def slabs(self, count: int) -> int:
        """Slabs of `count` entries."""
        return -(-count // self.per_slab)


class Slabs:
    """Which of the slabs 1 to `total` are free. Slab 0 is scratch.

    Attributes:
        unclean: slabs of pages that have been states: the next step, or a copy that comes before it,
            clears them (`StepPlan.cleared`). Numbers of states, read as KV, may not be finite, and
            attention kernels multiply masked values by zero.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.allocators: list[SlabAllocator] = []
        self.unclean, self._of_states = set[int](), set[int]()
        self.reclaim()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int, *, for_states: bool = False) -> list[int]:
        """So many free slabs, those that were given back last first."""
        slabs = self._free[: -count - 1 : -1]
        del self._free[-count:]
        if for_states:
            self.unclean.difference_update(slabs)
        else:
            been_states = self._of_states.intersection(slabs)
            self._of_states -= been_states
            self.unclean |= been_states
        return slabs

    def give_back(self, slabs: Sequence[int], *, of_states: bool = False) -> None:
        self._free += slabs
        if of_states:
            self._of_states.update(slabs)

    def pop_unclean(self) -> list[int]:
        """Returns the unclean slabs, in order, and counts them as clean: the caller has them cleared."""
        slabs, self.unclean = sorted(self.unclean), set()
        return slabs

    def shortages(self, counts: Sequence[int]) -> list[int]:
        """How many of `counts` entries of each allocator are not free, if all are lent together."""
        left = self.num_free
        short = [count - a.num_free if count > a.num_free else 0 for count, a in zip(counts, self.allocators)]
        for i, lacking in enumerate(short) if any(short) else ():
            share = self.allocators[i].share
            slabs = min(share.slabs(lacking), left)
            left -= slabs
            short[i] = max(lacking - slabs * share.per_slab, 0)
        return short

    def room(self) -> tuple[int, list[int]]:
        """If the cache gives up everything that nobody reads: free slabs, and each allocator's free
        entries in other slabs. Those that requests use and those of the cache that they have locked stay."""
        slabs, entries = self.num_free, list[int]()
        for allocator in self.allocators:
            kept = allocator.num_busy_slabs
            slabs += allocator.num_slabs - kept
            entries.append(kept * allocator.share.per_slab - allocator.num_used - allocator.num_locked)
        return slabs, entries

    def most(self) -> list[int]:
        """Entries of each allocator, if only one of them lends some and the cache gives up everything
        that nobody reads."""
        slabs, entries = self.room()
        return [own + slabs * a.share.per_slab for a, own in zip(self.allocators, entries)]

    def may_have(self, counts: Sequence[int]) -> bool:
        """Whether so many entries of each allocator can be lent together, if the cache gives up
        everything that nobody reads."""
        own = [a.num_free + a.num_cached - a.num_locked for a in self.allocators]
        if all([count <= most for count, most in zip(counts, own)]) or not any(self.shortages(counts)):
            return True
        slabs, entries = self.room()
        need = zip(self.allocators, counts, entries)
        return sum([a.share.slabs(max(count - own, 0)) for a, count, own in need]) <= slabs

    def reclaim(self) -> None:
        """Frees all slabs. Their owners have been told."""
        self._free = list(range(self.total, 0, -1))
        self._of_states = {*self._free} if any([a.of_states for a in self.allocators]) else set()
        self.unclean = set()

    def check(self) -> None:
        """Raises PoolError unless each slab is free or has exactly one owner."""
        held = [*self._free, *[slab for allocator in self.allocators for slab in allocator.owned()]]
        if sorted(held) != list(range(1, self.total + 1)):
            raise PoolError(f"of slabs 1 to {self.total}, {sorted(held)} are free or owned")


class SlabAllocator(EntryAllocator):
    """An EntryAllocator that takes slabs when it needs entries, and gives empty ones back.

    It fills one slab at a time, then the one with the fewest free entries, so that others become
    empty.

    Args:
        of_states: its entries are states.

    Attributes:
        num_free: free entries of its slabs.
        num_slabs: slabs that it owns.
        total: entries of all slabs.
    """

    def __init__(self, slabs: Slabs, share: SlabShare, what: str, *, of_states: bool = False) -> None:
        self.share, self.slabs, self._what, self.of_states = share, slabs, what, of_states
        self._gap = share.apart - share.per_slab
        self.total = slabs.total * share.per_slab
        end = 1 + slabs.total
        numbers = np.arange(end)[:, None] * share.apart + np.arange(share.per_slab)
        self._make_entries(numbers.ravel(), share.per_slab)
        # By slab: a stack of its free entries, their number, and whether it is owned.
        self._stacks = np.empty((end, share.per_slab), np.int64)
        self._free_counts, self._owned = np.zeros(end, np.int64), np.zeros(end, np.bool_)
        # By slab, entries that requests use or have locked. Counted as they change: there may be 100,000 entries, and
        # each prompt asks several times what room there is.
        self._busy = np.zeros(end, np.int64)
        self.num_slabs = self._filling = 0  # _filling: a slab; 0: none
        self._free_all()
        slabs.allocators.append(self)

    @property
    def num_used(self) -> int:
        return self.num_slabs * self.share.per_slab - self.num_free - self.num_cached

    @property
    def most_free(self) -> int:
        """Entries that could be lent if this allocator got all free slabs."""
        return self.num_free + self.slabs.num_free * self.share.per_slab

    def check_free(self, n: int) -> None:
        if n > self.num_free and n > self.most_free:
            raise OutOfSlotsError(f"{n} x {self._what} wanted, {self.most_free} of {self.total} free")

    def owned(self) -> list[int]:
        found: list[int] = self._owned.nonzero()[0].tolist()
        return found

    @property
    def num_busy_slabs(self) -> int:
        """Slabs with entries that requests use or have locked."""
        return int(np.count_nonzero(self._busy))

    def check(self) -> None:
        super().check()
        held = np.bincount((self._state != FREE).nonzero()[0] // self.share.per_slab, minlength=len(self._owned))
        if (held[~self._owned] > 0).any():
            raise PoolError(f"an entry of {self._what} is in a slab that has another owner: {self!r}")
        if (held + self._free_counts != self.share.per_slab)[self._owned].any():
            raise PoolError(f"a slab of {self._what} has lost entries: {self!r}")
        busy = ((self._state == USED) | (self._locks > 0)).reshape(len(self._owned), self.share.per_slab).sum(1)
        if (busy != self._busy).any():
            raise PoolError(f"entries of {self._what} in use or locked are counted wrongly by slab: {self!r}")
        if self.num_slabs != np.count_nonzero(self._owned) or (held[self._owned] == 0).any():
            raise PoolError(f"{self.num_slabs} slabs of {self._what}, or one of them is empty: {self!r}")

    def _note_busy(self, indices: np.ndarray, change: int) -> None:
        np.add.at(self._busy, indices // self.share.per_slab, change)

    # -- the free entries, by index

    def _take_one(self) -> int:
        slab = self._slab_to_fill()
        self._free_counts[slab] -= 1
        self._busy[slab] += 1
        self.num_free -= 1
        return self._stacks.item(slab, self._free_counts.item(slab))

    def _take_free(self, n: int) -> np.ndarray:
        if n == 1:  # fast path: decode steps
            return np.array([self._take_one()])
        parts = list[np.ndarray]()
        while n:
            if not self.num_free and n >= self.share.per_slab:
                parts.append(whole := self._take_whole(n // self.share.per_slab))
                n -= len(whole)
                continue
            slab = self._slab_to_fill()
            count = self._free_counts.item(slab)
            left = max(count - n, 0)
            parts.append(self._stacks[slab, left:count][::-1])
            self._free_counts[slab] = left
            self.num_free -= count - left
            n -= count - left
        taken = np.concatenate(parts) if parts else np.empty(0, np.int64)
        np.add.at(self._busy, taken // self.share.per_slab, 1)
        return taken

    def _take_whole(self, count: int) -> np.ndarray:
        """All entries of so many free slabs."""
        taken = self.slabs.take(count, for_states=self.of_states)
        self._owned[taken] = True
        self.num_slabs += count
        self._filling = taken[-1]
        entries: np.ndarray = np.array(taken)[:, None] * self.share.per_slab + np.arange(self.share.per_slab)
        return entries.ravel()

    def _slab_to_fill(self) -> int:
        if self._filling and self._free_counts.item(self._filling):
            return self._filling
        if self.num_free:
            partly = self._free_counts.nonzero()[0]
            self._filling = partly.item(self._free_counts[partly].argmin())
            return self._filling
        (slab,) = self.slabs.take(1, for_states=self.of_states)
        self._filling = slab
        per_slab = self.share.per_slab
        self._stacks[slab] = np.arange((slab + 1) * per_slab - 1, slab * per_slab - 1, -1)
        self._free_counts[slab], self._owned[slab] = per_slab, True
        self.num_slabs += 1
        self.num_free += per_slab
        return slab

    def _add_one(self, index: int, used: bool = True) -> None:
        slab = index // self.share.per_slab
        self._busy[slab] -= used
        count = self._free_counts.item(slab)
        self._stacks[slab, count] = index
        self._free_counts[slab] = count + 1
        self.num_free += 1
        if count + 1 == self.share.per_slab:
            self._give_up(np.array([slab]))

    def _add_free(self, indices: np.ndarray, used: bool) -> None:
        if len(indices) == 1:
            return self._add_one(indices.item(), used)
        slabs = indices // self.share.per_slab
        if used:
            np.subtract.at(self._busy, slabs, 1)
        self._free_counts += np.bincount(slabs, minlength=len(self._free_counts))
        self.num_free += len(indices)
        empty = self._free_counts == self.share.per_slab
        if len(kept := indices[~empty[slabs]]):
            self._stack(kept)
        if len(gone := empty.nonzero()[0]):
            self._give_up(gone)

    def _stack(self, indices: np.ndarray) -> None:
        """Puts freed entries, which are counted, on the stacks of their slabs. The first ones are taken
        first."""
        indices = indices[::-1]
        indices = indices[(indices // self.share.per_slab).argsort(kind="stable")]
        slabs, firsts, counts = np.unique(indices // self.share.per_slab, return_index=True, return_counts=True)
        places = np.arange(len(indices)) - np.repeat(firsts - self._free_counts[slabs] + counts, counts)
        self._stacks[np.repeat(slabs, counts), places] = indices

    def _give_up(self, slabs: np.ndarray) -> None:
        self._free_counts[slabs], self._owned[slabs] = 0, False
        self.num_slabs -= len(slabs)
        self.num_free -= len(slabs) * self.share.per_slab
        self.slabs.give_back(slabs.tolist(), of_states=self.of_states)

    def _free_all(self) -> None:
        """`Slabs.reclaim` follows."""
        self._free_counts[:], self._owned[:], self._busy[:] = 0, False, 0
        self.num_free = self.num_slabs = self._filling = 0

    def _all_free(self) -> np.ndarray:
        stacked = np.arange(self.share.per_slab) < self._free_counts[:, None]
        return self._stacks[stacked]

    # -- the places of entries in the arrays, by their numbers in the pool

    def _index(self, number: Number) -> Number:
        return number - number // self.share.apart * self._gap if self._gap else number

    @property
    def _valid(self) -> str:
        return f"there are {self.total} in {self.slabs.total} slabs"
