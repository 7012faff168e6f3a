"""The tier of the prefix cache in main memory, and the copies that steps launch for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hybridrt.mem_cache.pools.allocator import SlotAllocator
from hybridrt.mem_cache.pools.slots import Slot, Slots
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_drop import drop
from hybridrt.runtime.step.plan import HostCopy, HostState, StepPlan


class HostTier:
    """A radix tree over pages and states in main memory, with its own eviction order.

    New entries of the prefix cache are copied here at once, next to the steps, so the device's copy
    can be evicted at any time. A copy may read entries that are lent again before it has run:
    `seal` then makes the step that writes them wait. This is rare, because new pages are evicted
    last.

    Args:
        num_pages, num_states: entries of the tier.
        page_size, recurrent, lookahead: of RadixCache.
        copied: whether the copies of a ticket have ended (`Executor.copied`).
    """

    def __init__(
        self, num_pages: int, num_states: int, page_size: int, recurrent: bool, lookahead: int,
        copied: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self.tree = RadixCache(page_size if num_pages else 0, recurrent, lookahead)
        self.pages = SlotAllocator(num_pages, "KV page in main memory")
        self.slots = SlotAllocator(num_states, "state in main memory")
        self._copied = copied
        self._pending: list[HostCopy] = []
        self._ticket = 0  # of the latest copy
        self._after = 0  # the next plan waits for the copies up to this ticket
        self._read_pages: dict[int, int] = {}  # device entries that copies read, and the last copy's ticket
        self._read_slots: dict[int, int] = {}

    @property
    def last_ticket(self) -> int:
        return self._ticket

    def has_copied(self, ticket: int) -> bool:
        return not any(copy.ticket <= ticket for copy in self._pending) and self._copied(ticket)

    def offer(self, tokens: np.ndarray, pages: Sequence[Slot], states: Mapping[int, Slot], salt: str) -> None:
        """Copies the new parts of a text [n] int32: KV from the device's `pages` (from the first
        token on) and states by number of tokens. Nothing if there is no room.
        """
        held, positions = self.tree.held(tokens, salt)
        ends = sorted(end for end in states if end not in positions)[-self.slots.total :] if self.slots.total else []
        size = self.tree.page_size
        last = max([self.tree.complete(len(tokens)), *(-(-end // size) for end in ends)]) if size else 0
        need = max(last - len(held.pages), 0)
        self.tree.lock(held)  # this also marks the path as used
        room = self._make_room(need, len(ends))
        self.tree.unlock(held)
        if not room or not (need or ends):
            return
        fresh, slots = self.pages.alloc(need), self.slots.alloc(len(ends))
        hosted = dict(zip(ends, slots, strict=True))
        taken, _ = self.tree.insert(tokens, Slots(held.pages, fresh), hosted, salt)
        self.pages.to_cache(taken.pages)
        self.slots.to_cache(taken.states)
        surplus = self.pages.free_used(fresh)
        self.slots.free([slot for slot in slots if slot not in taken.states])
        self._store(
            Slots(pages)[len(held.pages) : last].at(~surplus),
            fresh.at(~surplus),
            [HostState(end, states[end].index, slot.index) for end, slot in hosted.items() if slot in taken.states],
        )

    def fetch(self, pages: Slots, places: Slots, states: Sequence[HostState]) -> int:
        """Copies pages `places` of the tier to `pages` of the device, and states. Returns the
        copy's ticket.
        """
        indices = pages.indices.tolist(), places.indices.tolist()
        self._ticket += 1
        self._pending.append(HostCopy(self._ticket, True, *indices, states))
        return self._ticket

    def withdraw(self, ticket: int) -> None:
        """Cancels a fetch. If its copy was launched, later plans wait for it before they write its
        targets.
        """
        left = [copy for copy in self._pending if copy.ticket != ticket]
        if len(left) == len(self._pending):
            self.wait_for(ticket)
        self._pending = left

    def wait_for(self, ticket: int) -> None:
        """The next plan runs after the copies up to `ticket`."""
        self._after = max(self._after, ticket)

    def seal(self, plan: StepPlan) -> None:
        """Adds pending copies to a plan. The plan waits for copies that read the entries that it
        writes.
        """
        plan.host_copies = list(self._pending)
        if self._read_pages:
            self._written(self._read_pages, (page for write in plan.page_writes for page in write.pages.tolist()))
        if self._read_slots:
            self._written(self._read_slots, (admission.state_slot for admission in plan.admissions))
            self._written(self._read_slots, (slot for row in plan.extend for _, slot in row.saves))
            self._written(self._read_slots, (move.target for move in plan.moves if not move.donates))
        plan.after_copies = self._after

    def launched(self, plan: StepPlan) -> None:
        self._after = 0 if self._after <= plan.after_copies else self._after
        del self._pending[: len(plan.host_copies)]

    def drop(self, tokens: np.ndarray, salt: str, *, whole: bool) -> None:
        """As hybridrt.mem_cache.prefix_tree.radix_drop.drop. No fetch may be under way."""
        gone = drop(self.tree, tokens, salt, whole=whole)
        self.pages.evict(gone.pages)
        self.slots.evict(gone.states)

    def clear(self) -> None:
        """Forgets everything. Later plans wait for running copies, which still write to the device."""
        self.tree.clear()
        self.pages.reclaim()
        self.slots.reclaim()
        self._pending.clear()
        self._read_pages.clear()
        self._read_slots.clear()
        self._after = self._ticket

    def check(self) -> None:
        """Raises PoolError unless free + used + cached == total."""
        self.pages.check()
        self.slots.check()

    def _store(self, pages: Slots, places: Slots, states: Sequence[HostState]) -> None:
        if pages or states:
            self._ticket += 1
            sources = pages.indices.tolist()
            self._pending.append(HostCopy(self._ticket, False, sources, places.indices.tolist(), states))
            self._read_pages.update(dict.fromkeys(sources, self._ticket))
            self._read_slots.update({state.slot: self._ticket for state in states})

    def _written(self, read: dict[int, int], entries: Iterable[int]) -> None:
        """Makes the next plan, which writes these entries, wait for the copies that read them."""
        for entry in entries:
            if entry in read:
                self.wait_for(read.pop(entry))

    def _make_room(self, pages: int, states: int) -> bool:
        gone = self.tree.evict(max(pages - self.pages.num_free, 0), max(states - self.slots.num_free, 0))
        self.pages.evict(gone.pages)
        self.slots.evict(gone.states)
        return pages <= self.pages.num_free and states <= self.slots.num_free
