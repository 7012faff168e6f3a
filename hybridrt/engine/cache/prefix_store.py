"""Moves pages and states between running requests and the prefix cache."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from hybridrt.engine.cache.answer_states import MOST, AnswerStates
from hybridrt.engine.cache.host_tier import HostTier
from hybridrt.engine.cache.window_pages import WindowPages
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.allocator import SlotAllocator
from hybridrt.mem_cache.pools.slots import Slot, Slots
from hybridrt.mem_cache.prefix_tree.prefix_cache import NO_MATCH, CacheCounts, CacheEntries, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node, StateKind
from hybridrt.mem_cache.prefix_tree.seen_texts import SeenTexts
from hybridrt.mem_cache.prefix_tree.state_worth import NewState

GRID = 16
MAX_SAVES = 3


class PrefixStore:
    """Moves pages and slots between requests and the radix tree, in the ledgers of both allocators.

    Args:
        page_size: tokens in a page.
        lookahead: of RadixCache.
        keeps: False never keeps anything.
        windows: if every attention layer has a sliding window, the pages of each state. The tree
            then has no pages.

    Attributes:
        grid: prompts leave states at multiples of so many tokens. It is a whole number of pages: a
            request that continues writing its last page can give the pages before it away.
        tier: entries in main memory; None: nothing.
        answers: states of running requests within their answers. Their slots are given up first.
    """

    def __init__(
        self, pages: SlotAllocator, slots: SlotAllocator, rows: SlotAllocator, page_size: int, lookahead: int,
        keeps: bool, windows: WindowPages | None = None,
    ) -> None:  # fmt: skip
        page_size = page_size if pages.total else 0
        self.tree = RadixCache(0 if windows else page_size, slots.total > 0, lookahead)
        self.windows = windows
        self.counts = CacheCounts()
        self.tier: HostTier | None = None
        self.answers = AnswerStates(rows.total)
        self._seen = SeenTexts()
        self.grid = max(GRID, page_size)
        self._pages, self._slots, self._rows, self.keeps = pages, slots, rows, keeps

    def match(self, request: Request) -> PrefixMatch:
        """The part of a waiting request that needs no computing. Nothing is locked."""
        if not self.keeps or not request.reads_cache:
            return NO_MATCH
        match = self.tree.match(request.ids, request.params.cache_salt or "")
        if self.windows is None or match.state is None:
            return match
        window = self.windows.of(match.state)
        return NO_MATCH if window is None else replace(match, window=window)

    def touch(self, tokens: np.ndarray, salt: str) -> int:
        """How many first tokens of a prompt [n] int32 have KV here in whole pages, with or without
        a state. Marks them as used now.
        """
        if not self.keeps or not self.tree.page_size:
            return 0
        return self.tree.touch(tokens, salt)

    def holds(self, tokens: np.ndarray, salt: str) -> bool:
        """True if a request that begins with these tokens [n] int32 would compute none of them."""
        return self.keeps and self.path(tokens, salt)[0].length == len(tokens)

    def arrived(self, request: Request) -> PrefixMatch | None:
        """The prefix that came from elsewhere, with the cache's pages that were left out there.
        None: nothing came, or these pages have been evicted since.
        """
        found = request.arrived
        if found is None or not found.staged_from:
            return found
        known = request.ids[: found.staged_from + self.tree.lookahead]
        held, _ = self.tree.held(known, request.params.cache_salt or "")
        return replace(found, pages=held.pages, node=held.node) if held.length == found.staged_from else None

    def expect(self, request: Request) -> None:
        """The request waits: its present match is kept, as far as room allows."""
        if self.keeps and request.reads_cache:
            self.tree.expect(request.ids, request.arrival, request.params.cache_salt or "")

    def forget(self, request: Request) -> None:
        self.tree.forget(request.arrival)

    def shares(self, num_tokens: int) -> bool:
        """True if a prompt of so many tokens may leave something for another one of the same
        tokens.
        """
        return self.keeps and num_tokens > (self.grid if self._slots.total else self.tree.page_size)

    def lock(self, match: PrefixMatch) -> None:
        if match.node is None:
            return
        self.tree.lock(match)
        self._pages.lock(Slots(match.pages, match.window))
        for slots, entry in ((self._slots, match.state), (self._pages, match.tail)):
            slots.lock(() if entry is None else (entry,))

    def unlock(self, match: PrefixMatch) -> None:
        self.has_read(match)
        self._pages.unlock(match.pages)
        self.tree.unlock(match)

    def has_read(self, match: PrefixMatch) -> PrefixMatch:
        """State and tail of a match have been read. Returns what is still locked."""
        if match.state is None:
            return match
        freed = self.tree.unlock_state(match)
        for slots, entry in ((self._slots, match.state), (self._pages, match.tail)):
            slots.unlock(() if entry is None else (entry,))
        self._pages.evict(freed)
        self._pages.unlock(match.window)
        return replace(match, state=None, tail=None, tail_node=None, window=())

    def admitted(self, request: Request, match: PrefixMatch) -> None:
        """Counts a match and chooses where the rest of the prompt leaves states: at its last place
        on the grid, where a cached or waiting prompt leaves its path, and at marked boundaries, the
        last ones first.
        """
        prompt = request.prefill_end
        if not request.metrics.retractions and not request.afresh:
            request.metrics.admission_time = time.monotonic()
            self._count(request, match)
        request.shared, request.save_at = False, ()
        if self.keeps and self._slots.total:
            parts = self.tree.waiting.partings(request.ids[:prompt], request.params.cache_salt or "")
            ends = (prompt - 1, match.fork, *sorted({*parts, *request.boundaries}, reverse=True))
            grid = dict.fromkeys(min(end, prompt - 1) // self.grid * self.grid for end in ends)
            request.save_at = tuple([end for end in grid if end > match.length][:MAX_SAVES])

    def chunk_end(self, request: Request, start: int, end: int) -> int:
        """Best end of a chunk from `start` to `end`: a state can only be saved before one of the
        chunk's tokens.
        """
        return end - 1 if end in request.save_at and end - start > 1 else end

    def save(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """Slots for the states that a chunk leaves, as (tokens of the chunk, slot) in order. States
        without a slot are left out: requests that may come need slots first.
        """
        saves = list[tuple[int, int]]()
        for place in request.save_at:
            if start < place < end and (slot := self._slot_for(request, place)) is not None:
                request.saves[place] = slot
                saves.append((place - start, slot.index))
        return sorted(saves)

    def keep_windows(self, request: Request, computed: int) -> None:
        """If every attention layer has a sliding window: offers the saved states up to `computed`
        tokens while the request has the pages that they need. States without room for their pages
        are left out.
        """
        if self.windows is None:
            return
        for place in [place for place in request.saves if place <= computed]:
            slot, pages = request.saves.pop(place), len(self.windows.span(place))
            fits = pages <= self.room()[0] and self.make_room(pages, 0)
            if fits and slot in self._insert(request, request.ids[:place], {place: slot})[0].states:
                self.windows.keep(slot, self.windows.copy(request, place))
            else:
                self._slots.free([slot])

    def share(self, request: Request) -> None:
        """Gives the whole pages and saved states of a computed prompt to the cache. They stay
        locked for the request.
        """
        request.shared = True
        if not self.keeps:
            return
        if self._slots.total and self.windows is None:
            self.answers.begin(request)
        ids = request.ids[: request.prefill_end]
        taken, node = self._insert(request, ids, request.saves)
        self._pages.lock(taken.pages)
        request.given = taken.pages
        self._free_saves(request, taken)
        if node.parent is not None:
            before, request.prefix = request.prefix, replace(request.prefix, node=node)
            self.tree.lock(PrefixMatch(node=node))
            self.tree.unlock(before)

    def release(self, request: Request) -> CacheEntries:
        """Offers the request's entries and unlocks what it has read. Returns what was taken over."""
        taken = self._offer(request)
        self.answers.end(request)
        self._free_saves(request, taken)
        self._pages.unlock(request.given)
        self.unlock(request.prefix)
        request.given, request.prefix = Slots(), NO_MATCH
        return taken

    def path(self, tokens: np.ndarray, salt: str) -> tuple[PrefixMatch, list[tuple[int, Slot]]]:
        """The cached part of a text [n] int32, up to all of it, and its states as (number of
        tokens, slot) in order. Of states within answers only the last counts. Nothing is locked.
        """
        match = self.tree.match(np.append(tokens, np.int32(-1)), salt)
        nodes = [] if match.node is None else list(match.node.path)
        kept = [node for node in reversed(nodes) if node is match.node or node.kind is not StateKind.ANSWER]
        return match, [(node.end, node.state) for node in kept if node.state is not None]

    def known_at(self, length: int) -> int:
        """Token ids that `length` tokens with KV need to be a prefix: without a state after them,
        the pages of a prediction head need the next token too.
        """
        return length if self.tree.recurrent else length + self.tree.lookahead

    def length_of(self, num_tokens: int) -> int:
        return num_tokens if self.tree.recurrent else num_tokens - self.tree.lookahead

    def room(self) -> tuple[int, int]:
        """Upper bounds of the pages and state slots that are free or evictable."""
        pages, slots = (pool.num_free + pool.num_cached - pool.num_locked for pool in (self._pages, self._slots))
        return pages, slots + len(self.answers)

    def make_room(self, pages: int, slots: int) -> bool:
        """Evicts until so many pages and slots are free. False if there are still too few."""
        short = max(pages - self._pages.num_free, 0), max(slots - self._slots.num_free, 0)
        if any(short):
            self.evict(*short)
        return pages <= self._pages.num_free and slots <= self._slots.num_free

    def take_room(self, num_pages: int, num_states: int) -> tuple[Slots, Slots] | None:
        """Pages and state slots for `adopt`. None if there are too few: an evicted page may become
        the tail of a state that is kept.
        """
        if not self.make_room(num_pages, num_states):
            return None
        return self._pages.alloc(num_pages), self._slots.alloc(num_states)

    def room_for_fetch(
        self, num_pages: int, spare_pages: int, new: NewState | None
    ) -> tuple[Slots, Slot | None] | None:
        """Pages, and a slot if `new` is given, for `adopt`. None if requests may lack them:
        `spare_pages` more pages must be free or evictable.
        """
        if self._pages.total and num_pages + spare_pages > self.room()[0]:
            return None
        slot = None if new is None else self._spare_slot(new)
        taken = None if new is not None and slot is None else self.take_room(num_pages, 0)
        if taken is None:
            self._slots.free([slot] if slot is not None else [])
            return None
        return taken[0], slot

    def give_up_room(self, pages: Sequence[Slot], slots: Sequence[Slot]) -> None:
        self._pages.free(pages)
        self._slots.free(slots)

    def adopt(self, tokens: np.ndarray, held: Slots, pages: Slots, states: dict[int, Slot], salt: str) -> None:
        """Inserts `tokens` into the tree. `held`: pages that the tree owns already; `pages`,
        `states`: entries reserved with `take_room` that now contain the rest. Entries that another
        insertion has made redundant are freed.
        """
        self._seen.note(tokens, salt)
        taken, _ = self.tree.insert(tokens, Slots(held, pages), states, salt)
        self._pages.to_cache(taken.pages)
        self._slots.to_cache(taken.states)
        self._pages.free_used(pages)
        self._slots.free([slot for slot in states.values() if slot not in taken.states])

    def evict(self, pages: int, states: int, *, new: NewState | None = None) -> None:
        """Frees so many entries that no request reads, or all there are; `new` as in
        RadixCache.evict.
        """
        self._slots.free(given_up := self.answers.give_up(states))
        states -= len(given_up)
        gone = self.evicted(self.tree.evict(0 if self.windows else pages, states, new=new))
        if self.windows is not None:
            freed = self.windows.drop(gone)
            while freed < pages and (gone := self.evicted(self.tree.evict(0, 1))):
                freed += self.windows.drop(gone)

    def reset(self) -> bool:
        self._seen.clear()
        if self.tier is not None:
            self.tier.clear()
        self.evict(self._pages.total, self._slots.total)
        return not self._pages.num_cached and not self._slots.num_cached

    def slot_within(self, request: Request, fresh: int) -> Slot | None:
        """A slot for a state within an answer: a free one or that of another such state, first of
        ended requests, then of running ones, but not one of the latest `fresh`.
        """
        if len(request.saves) >= MOST:
            self._slots.free(self.answers.spread(request))
        if self._slots.num_free <= self._reserved_slots() and not self.evicted(self.tree.evict(0, 1, new=NewState(0))):
            gone = self.answers.spread(request)
            self._slots.free(gone if gone or len(self.answers) <= fresh else self.answers.give_up(1))
        return self._slots.alloc(1)[0] if self._slots.num_free > self._reserved_slots() else None

    def counters(self) -> dict[str, int]:
        held = {} if self.tier is None else {
            "host_pages": self.tier.pages.num_cached, "host_states": self.tier.slots.num_cached
        }  # fmt: skip
        return held | {f"cache_{name}": value for name, value in asdict(self.counts).items()}

    def totals(self) -> dict[str, int]:
        found = {"host_pages": 0, "host_pages_total": 0, "host_states": 0, "host_states_total": 0}
        if self.tier is not None:
            for name, pool in (("host_pages", self.tier.pages), ("host_states", self.tier.slots)):
                found |= {name: pool.num_cached, f"{name}_total": pool.total}
        return found | asdict(self.counts)

    def _count(self, request: Request, match: PrefixMatch) -> None:
        """Counts a match. No token is lost twice. The last one of a prompt is always computed, so
        never lost. Requests that skip the match lose nothing.
        """
        counts, salt, prompt = self.counts, request.params.cache_salt or "", request.prefill_end
        request.metrics.cached_tokens = match.length if match.staged is None else match.staged_from
        counts.asked += prompt
        counts.hit += request.metrics.cached_tokens
        if match.staged is not None or not self.keeps:
            return
        if request.params.prompt_logprobs is None:
            evicted = max(self._seen.length(request.ids[: prompt - 1], salt) - match.known, 0)
            counts.without_kv += evicted
            known = min(match.known, prompt - 1)
            counts.retokenised += max(min(match.retokenised, prompt - 1 - known) - evicted, 0)
            counts.without_state += known - match.length if self._slots.total else 0
        if self.tier is not None:
            self.tier.tree.touch(request.ids[: match.length], salt)

    def _offer(self, request: Request) -> CacheEntries:
        """Offers nothing of a failed request, whose state may be wrong, nor of one that has added
        nothing.
        """
        computed, failed = request.computed, request.broken or request.error is not None
        if not self.keeps or failed or computed <= request.prefix.length:
            return CacheEntries()
        ids = request.ids
        self.keep_windows(request, computed)
        states = dict(request.saves)
        # Keep out a state that includes tokens past the end of the text: the last step may have
        # computed some.
        if request.state_slot is not None and computed <= len(ids):
            states[computed] = request.state_slot
        taken = self._insert(request, ids[: computed + self.tree.lookahead], states)[0]
        if self.windows is None or not taken.states:
            return taken
        pages = self.windows.held(request, computed)
        self.windows.keep(taken.states[0], pages)
        return CacheEntries(pages, taken.states)

    def _insert(self, request: Request, ids: np.ndarray, states: dict[int, Slot]) -> tuple[CacheEntries, Node]:
        if request.prefix.node is not None and request.prefix.node.hidden:  # it was computed from what was dropped
            return CacheEntries(), Node(np.empty(0, np.int32), 0)
        salt = request.params.cache_salt or ""
        self._seen.note(ids, salt)
        kinds = {place: StateKind.FORK for place in states if place in request.save_at[1:]}
        within = {place: StateKind.ANSWER for place, slot in states.items() if slot in self.answers}
        taken, node = self.tree.insert(ids, request.pages, states, salt, len(request.prompt), kinds | within)
        self._pages.to_cache(taken.pages)
        self._slots.to_cache(taken.states)
        if within:
            self.evicted(self.tree.thin(node, MOST))
        if self.tier is not None:
            # Once the cache has a slot and its ring is folded, the state in it is complete.
            kept = {slot for slot in (*taken.states, *request.saves.values()) if slot not in self.answers}
            self.tier.offer(ids, request.pages, {end: slot for end, slot in states.items() if slot in kept}, salt)
        return taken, node

    def _free_saves(self, request: Request, taken: CacheEntries) -> None:
        self._slots.free([slot for slot in request.saves.values() if slot not in taken.states])
        request.saves = {}

    def _slot_for(self, request: Request, place: int) -> Slot | None:
        spare = self._slots.num_free + len(self.answers) + self.tree.num_within
        if spare <= self._reserved_slots() and (slot := self._superseded(request)) is not None:
            return slot
        arrivals = self.tree.waiting.behind(request.ids[:place], request.params.cache_salt or "")
        return self._spare_slot(NewState(place - request.prefix.length, arrivals))

    def evicted(self, gone: CacheEntries) -> Sequence[Slot]:
        self._pages.evict(gone.pages)
        self._slots.evict(gone.states)
        return gone.states

    def _superseded(self, request: Request) -> Slot | None:
        """The slot of the state that a request has started from, if no other will use it. The step
        that leaves a later state there reads the earlier one first.
        """
        match, lacking = request.prefix, self.room()[1] < self._rows.num_free
        if lacking or self.windows is not None or (state := self.tree.supersede(match)) is None:
            return None
        if match.state is not None:
            self._slots.unlock([state])
            request.prefix = replace(match, state=None)
        self._slots.evict([state])
        return self._slots.alloc_one()

    def _spare_slot(self, new: NewState) -> Slot | None:
        """A slot for a state. As many slots as there are free rows stay free or evictable, so no
        request lacks one.
        """
        if self.room()[1] <= self._rows.num_free:
            return None
        short = self._reserved_slots() + 1 - self._slots.num_free
        if short > 0:
            self.evict(0, short, new=new)
        return self._slots.alloc_one() if self._slots.num_free > self._reserved_slots() else None

    def _reserved_slots(self) -> int:
        """Slots that waiting requests need with their rows: otherwise a state of more worth may be
        evicted for them.
        """
        return min(self._rows.num_free, len(self.tree.waiting))
