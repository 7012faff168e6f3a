"""The tier of the prefix cache in main memory, and the copies that steps launch for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hybridrt.kernels.core.slots import NO_SLOT
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle, Handles
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageAllocators, PageSets, no_sets, pages_of
from hybridrt.mem_cache.pools.slabs import SlabShare
from hybridrt.mem_cache.pools.state_moves import When
from hybridrt.mem_cache.prefix_tree.cache_events import Why
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_drop import drop
from hybridrt.runtime.step.plan import HostCopy, HostState, StepPlan

Entry = TypeVar("Entry")


class HostTier:
    """A radix tree over pages and states in main memory, with its own eviction order.

    New entries of the prefix cache are copied here at once, next to the steps, so the device's copy
    can be evicted at any time. A copy may read entries that are lent again before it has run:
    `seal` then makes the step that writes them wait. This is rare, because new pages are evicted
    last.

    Args:
        pages: ledgers of its pages, in the groups of the device.
        num_states: states of the tier.
        device: the tree of the entries on the device.
        copied: whether the copies of a ticket have ended (`Executor.copied`).
        shares: how the device's page groups, then its states, see the memory that they share, if
            they do.
    """

    def __init__(
        self, pages: PageAllocators, num_states: int, device: RadixCache, copied: Callable[[int], bool],
        shares: Sequence[SlabShare] = (),
    ) -> None:  # fmt: skip
        self.tree = RadixCache(
            device.page_size, device.recurrent, device.lookahead, device.windows, pages.are_idle, device.events, "host"
        )
        self.pages = pages
        self.slots = EntryAllocator(num_states, "state in main memory")
        self._copied = copied
        self._pending: list[HostCopy] = []
        self._ticket = 0  # of the latest copy
        self._after = 0  # the next plan waits for the copies up to this ticket
        self._shares = tuple(shares)
        # Device entries that copies read, and the last copy's ticket. Pages by group and number,
        # and all by slab and group; the states are the group after the last one.
        self._read_pages: dict[tuple[int, int], int] = {}
        self._read_slabs: dict[int, dict[int, int]] = {}
        self._read_slots: dict[int, int] = {}

    @property
    def last_ticket(self) -> int:
        return self._ticket

    def has_copied(self, ticket: int) -> bool:
        """Whether the copies up to this ticket were launched and have ended."""
        return not any(copy.ticket <= ticket for copy in self._pending) and self._copied(ticket)

    def offer(self, tokens: np.ndarray, pages: PageSets, states: Mapping[int, Handle], key: CacheKey) -> None:
        """Copies the new parts of a text [n] int32: KV from the device's sets `pages` [m, G] (from
        the first token on) and states by number of tokens. Nothing if there is no room.
        """
        held, positions = self.tree.cached_pages(tokens, key)
        ends = sorted(end for end in states if end not in positions)[-self.slots.total :] if self.slots.total else []
        size = self.tree.page_size
        last = max([self.tree.paths.complete_pages(len(tokens)), *(-(-end // size) for end in ends)]) if size else 0
        hosted = no_sets(len(self.pages), last)
        hosted[: len(held.pages)] = held.pages[:last]
        lacking = (pages[:last] > 0) & (hosted == 0)
        need = np.count_nonzero(lacking, axis=0).tolist()
        known = pages_of(held.pages)
        self.tree.lock(held)  # this also marks the path as used
        self.pages.lock(known)
        room = self._make_room(need, len(ends))
        self.pages.unlock(known)
        self.tree.unlock(held)
        if not room or not (any(need) or ends):
            return
        fresh, slots = self.pages.alloc(need), self.slots.alloc(len(ends))
        for column, where, own in zip(hosted.T, lacking.T, fresh):
            column[where] = own.keys
        places = dict(zip(ends, slots, strict=True))
        taken, _ = self.tree.insert(tokens, hosted, places, key, why="copied")
        self.pages.to_cache(taken.pages)
        self.slots.to_cache(taken.states)
        kept = [~group.free_used(own) for group, own in zip(self.pages.groups, fresh)]
        self.slots.free([slot for slot in slots if slot not in taken.states])
        self._store(
            tuple(Handles.of_keys(pages[:last, g][lacking[:, g]]).at(kept[g]) for g in range(len(kept))),
            tuple(own.at(mask) for own, mask in zip(fresh, kept)),
            [HostState(end, states[end].index, slot.index) for end, slot in places.items() if slot in taken.states],
        )

    def fetch(self, pages: GroupPages, places: GroupPages, states: Sequence[HostState], cleared: Sequence[int]) -> int:
        """Copies pages `places` of the tier to `pages` of the device, and states, after it has zeroed
        slabs. Returns the copy's ticket.
        """
        self._ticket += 1
        self._pending.append(HostCopy(self._ticket, True, _numbers(pages), _numbers(places), states, cleared))
        if cleared:
            self.wait_for(self._ticket)  # others have pages there
        return self._ticket

    def withdraw(self, ticket: int) -> Sequence[int]:
        """Cancels a fetch. If its copy was launched, later plans wait for it before they write its
        targets. Returns the slabs that it has not zeroed.
        """
        for copy in self._pending:
            if copy.ticket == ticket:
                self._pending.remove(copy)
                return copy.cleared
        self.wait_for(ticket)
        return ()

    def wait_for(self, ticket: int) -> None:
        """The next plan runs after the copies up to `ticket`."""
        self._after = max(self._after, ticket)

    def seal(self, plan: StepPlan) -> bool:
        """Adds pending copies to a plan. The plan waits for copies that read the entries that it
        writes. True if it fetches a prefix.
        """
        plan.host_copies = list(self._pending)
        if self._read_pages or self._read_slabs:
            pages = [(g, page) for write in plan.page_writes for g, column in enumerate(write.pages.T)
                     for page in column.tolist() if page]  # fmt: skip
            self._written(self._read_pages, pages)
            self._slabs_written(pages)
        if self._read_slots or self._read_slabs:
            slots = [admission.state_slot for admission in plan.admissions]
            slots += [slot for row in plan.extend for _, slot in row.saves]
            slots += [move.target for move in plan.moves if move.when is When.BEFORE_ROWS]
            slots = [slot for slot in slots if slot != NO_SLOT]
            self._written(self._read_slots, slots)
            self._slabs_written([(len(self.pages), slot) for slot in slots])
        for slab in plan.cleared:
            self._slab_written(slab, by=None)
        plan.after_copies = self._after
        return any(copy.fetch for copy in plan.host_copies)

    def launched(self, plan: StepPlan) -> None:
        self._after = 0 if self._after <= plan.after_copies else self._after
        del self._pending[: len(plan.host_copies)]

    def drop(self, tokens: np.ndarray, key: CacheKey, *, whole: bool) -> None:
        """As hybridrt.mem_cache.prefix_tree.radix_drop.drop. No fetch may be under way."""
        gone = drop(self.tree, tokens, key, whole=whole)
        self.pages.evict(gone.pages)
        self.slots.evict(gone.states)

    def clear(self, why: Why) -> None:
        """Forgets everything. Later plans wait for running copies, which still write to the device."""
        self.tree.clear(why)
        self.pages.reclaim()
        self.slots.reclaim()
        self._pending.clear()
        self._read_pages.clear()
        self._read_slabs.clear()
        self._read_slots.clear()
        self._after = self._ticket

    def check(self) -> None:
        """Raises PoolError unless free + used + cached == total."""
        self.pages.check()
        self.slots.check()

    def _store(self, pages: GroupPages, places: GroupPages, states: Sequence[HostState]) -> None:
        if any(map(len, pages)) or states:
            self._ticket += 1
            sources = _numbers(pages)
            self._pending.append(HostCopy(self._ticket, False, sources, _numbers(places), states))
            read = [(g, page) for g, numbers in enumerate(sources) for page in numbers]
            self._read_pages.update(dict.fromkeys(read, self._ticket))
            self._read_slots.update({state.slot: self._ticket for state in states})
            read += [(len(self.pages), state.slot) for state in states]
            for group, number in read if self._shares else ():
                self._read_slabs.setdefault(number // self._shares[group].apart, {})[group] = self._ticket

    def _slabs_written(self, entries: Iterable[tuple[int, int]]) -> None:
        """The next plan writes these pages or states. Makes it wait for copies that still read entries which other
        groups had in the same slabs."""
        for group, number in entries if self._shares else ():
            self._slab_written(number // self._shares[group].apart, by=group)

    def _slab_written(self, slab: int, by: int | None) -> None:
        readers = self._read_slabs.get(slab, {})
        for other in readers.keys() - {by}:
            self.wait_for(readers.pop(other))

    def _written(self, read: dict[Entry, int], entries: Iterable[Entry]) -> None:
        """The next plan, which writes these entries, waits for the copies that read them."""
        for entry in entries:
            if entry in read:
                self.wait_for(read.pop(entry))

    def _make_room(self, pages: Sequence[int], states: int) -> bool:
        gone = self.tree.evict(self.pages.shortages(pages), max(states - self.slots.num_free, 0))
        self.pages.evict(gone.pages)
        self.slots.evict(gone.states)
        return not any(self.pages.shortages(pages)) and states <= self.slots.num_free


def _numbers(pages: GroupPages) -> list[list[int]]:
    return [held.indices.tolist() for held in pages]
