"""Entries that requests and the prefix cache can have: those that are free, or that the cache gives up."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hybridrt.engine.cache.answer_states import MOST, AnswerStates
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle
from hybridrt.mem_cache.pools.page_groups import PageAllocators
from hybridrt.mem_cache.pools.room import Room
from hybridrt.mem_cache.pools.slabs import SlabAllocator
from hybridrt.mem_cache.prefix_tree.cache_events import Why
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheEntries
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.state_worth import NewState


class CacheRoom:
    """Room in the ledgers of pages and state slots, some of it by eviction.

    Attributes:
        pages, slots: the ledgers of the device's pages and states.
        slabs: what page groups share; None: nothing. one_memory: states share it too.
        room_left: what could be lent.
        answers: states of running requests within their answers. Their slots are given up first.
    """

    def __init__(self, tree: RadixCache, pages: PageAllocators, slots: EntryAllocator, rows: EntryAllocator) -> None:
        self.tree, self.pages, self.slots, self._rows = tree, pages, slots, rows
        self.answers = AnswerStates()
        self.slabs, self.one_memory = pages.slabs, isinstance(slots, SlabAllocator)
        self.room_left = pages.slabs if pages.slabs is not None and self.one_memory else Room(pages, slots)

    def room(self) -> tuple[tuple[int, ...], int]:
        """Upper bounds of the pages of each group, and the state slots, that are free or evictable."""
        *pages, slots = self.room_left.most()
        return tuple(pages), slots + len(self.answers.places)

    def has_room(self, pages: Sequence[int], slots: int) -> bool:
        """Whether `pages` of each group and `slots` are free or evictable. In one memory, states
        within answers of running requests give way first."""
        if not self.one_memory:
            return self.room_left.may_have([*pages, max(slots - len(self.answers.places), 0)])
        if not (found := self.room_left.may_have([*pages, slots])) and len(self.answers.places):
            self.slots.free(self.answers.give_up(len(self.answers.places)))
            found = self.room_left.may_have([*pages, slots])
        return found

    def evict_for(self, pages: Sequence[int], slots: int) -> bool:
        """Evicts until `pages` of each group and `slots` are free. False, with nothing evicted,
        if that would not be enough. Also False if an evicted page became the tail of a state.
        """
        if not self.has_room(pages, slots):
            return False
        short = self.room_left.shortages(wanted := [*pages, slots])
        if self.slabs is None:
            self.evict(short[:-1], short[-1])
            short = self.room_left.shortages(wanted)
        while self.slabs is not None and any(short) and self._evict_least(short[:-1]):
            short = self.room_left.shortages(wanted)
        return not any(short)

    def evict(self, pages: Sequence[int], states: int, *, new: NewState | None = None, why: Why = "evicted") -> None:
        """Frees `pages` of each group and `states` that no request reads, or all there are. `new` and
        `why` as in RadixCache.evict.
        """
        self.slots.free(given_up := self.answers.give_up(states))
        self.free_evicted(self.tree.evict(pages, states - len(given_up), new=new, why=why))

    def free_evicted(self, gone: CacheEntries) -> Sequence[Handle]:
        """Frees the pages and slots that the tree has given up. Returns the slots."""
        self.pages.evict(gone.pages)
        self.slots.evict(gone.states)
        return gone.states

    def _evict_least(self, short: Sequence[int]) -> bool:
        """Evicts the pages or the state of least worth. `short`: how many pages each group lacks. False if
        requests read all that is left.

        Pages that a window has passed go first. In a model with recurrent layers, pages that no
        state needs are next, then the state of least worth: pages are only of use to the states
        after them. In other models the ends of texts go in order of their last use. They go in all
        groups, which may empty slabs for other groups.
        """
        tree, some = self.tree, sum(short) or self.pages.shares[0].per_slab
        evictions = (
            partial(tree.evict_passed, short),
            *([partial(tree.evict_leaf, some, stateless=True)] if tree.recurrent else ()),
            partial(tree.evict, self._no_pages, 1 if self.one_memory else 0),
            partial(tree.evict_leaf, some),
            partial(tree.evict, short, 0),  # pages of windows within texts that are read
            partial(tree.evict, [group.total for group in self.pages.groups], 0),
        )
        return any(self._any_evicted(evict()) for evict in evictions)

    def _any_evicted(self, gone: CacheEntries) -> bool:
        if not gone.states and not any(map(len, gone.pages)):
            return False
        self.free_evicted(gone)
        return True

    def slot_within(self, request: Request, fresh: int) -> Handle | None:
        """A slot for a state within an answer: a free one or that of another such state, first of
        ended requests, then of running ones, but not one of the latest `fresh`.
        """
        if len(request.saves) >= MOST:
            self.slots.free(self.answers.spread(request))
        if self.slots.most_free <= self._reserved_slots() and not self.free_evicted(
            self.tree.evict(self._no_pages, 1, new=NewState(0))
        ):
            gone = self.answers.spread(request)
            self.slots.free(gone if gone or len(self.answers.places) <= fresh else self.answers.give_up(1))
        return self.slots.alloc(1)[0] if self.slots.most_free > self._reserved_slots() else None

    def _slot_for(self, request: Request, place: int) -> Handle | None:
        spare = self.slots.most_free + len(self.answers.places) + self.tree.num_within
        if spare <= self._reserved_slots() and (slot := self._superseded(request)) is not None:
            return slot
        arrivals = self.tree.waiting.continuing(request.ids[:place], request.cache_key)
        return self.spare_slot(NewState(place - request.prefix.length, arrivals))

    def spare_slot(self, new: NewState) -> Handle | None:
        """A slot for a state, if requests that may come do not need it."""
        if self.room()[1] <= self._promised_slots():
            return None
        while self.one_memory and self.slots.most_free <= self._reserved_slots():
            useless = self.tree.evict_leaf(self.pages.shares[0].per_slab, stateless=True)
            if not self._any_evicted(useless):
                break
        short = self._reserved_slots() + 1 - self.slots.most_free
        if short > 0:
            self.evict(self._no_pages, short, new=new)
        return self.slots.alloc_one() if self.slots.most_free > self._reserved_slots() else None

    def _superseded(self, request: Request) -> Handle | None:
        """The slot of the state that a request has started from, if no other will use it. The step
        that leaves a later state there reads the earlier one first: nobody else may get the slot in
        between.
        """
        match, lacking = request.prefix, self.room()[1] < self._promised_slots()
        if lacking or (state := self.tree.supersede(match)) is None:
            return None
        if match.state is not None:
            self.slots.unlock([state])
            request.prefix = replace(match, state=None)
        return self.slots.lend_cached(state)

    @property
    def _no_pages(self) -> Sequence[int]:
        return [0] * len(self.pages)

    def _promised_slots(self) -> int:
        """Slots that stay free or evictable: one for each free row, so no request lacks one. In one
        memory rows may be more than fit, and requests wait for pages anyway.
        """
        return self._reserved_slots() if self.one_memory else self._rows.num_free

    def _reserved_slots(self) -> int:
        """Free slots that waiting requests need with their rows: otherwise a state of more worth may
        be evicted for them. In one memory the first request alone: others lack pages too.
        """
        waiting = len(self.tree.waiting)
        return min(self._rows.num_free, waiting, 1 if self.one_memory else waiting)
