"""Moves pages and states between running requests and the prefix cache."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from hybridrt.base.spans import Span
from hybridrt.engine.cache.answer_states import MOST
from hybridrt.engine.cache.cache_room import CacheRoom
from hybridrt.engine.cache.host_tier import HostTier
from hybridrt.engine.request.sample_request import UNLIMITED, Request
from hybridrt.mem_cache.pools.entries import EntryAllocator, Handle
from hybridrt.mem_cache.pools.page_groups import PageAllocators, no_sets, pages_of
from hybridrt.mem_cache.prefix_tree.cache_events import CacheSubscription, Why
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import (
    NO_MATCH,
    CacheCounts,
    CacheEntries,
    CacheMiss,
    LostReuse,
    PrefixMatch,
)
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node, StateKind
from hybridrt.mem_cache.prefix_tree.state_worth import NewState
from hybridrt.runtime.step.pack_padded import StateSaves

log = logging.getLogger("hybridrt.cache")
GRID = 16
MAX_SAVES = 3
MAX_FORKS = 4  # further states of a running prompt, for requests that wait for it
SPACED, MOST_SPACED = 2048, 16  # tokens between the spaced states of a prompt, and how many it leaves
REST_TOKENS = 1536  # most tokens that a chunk leaves for a step of their own, so that it ends after a spaced state


class PrefixStore(CacheRoom):
    """Moves pages and slots between requests and the radix tree, in the ledgers of the allocators.

    Args:
        lookahead: of RadixCache.
        keeps: False never keeps anything.

    Attributes:
        grid: tokens; prompts leave states at multiples of it. It is a whole number of pages, so a
            request that still writes its last page can give the earlier ones to the cache.
        tier: entries in main memory; None: there are none.
        lost: counts why requests compute tokens of earlier texts again.
        chunk_saves: how a chunk of text saves states. Prompts then also leave states at even
            distances (`Request.spaced`). None: they do not, and a chunk saves all states that it can.
        graph_tokens: of the largest graph; 0: there are no graphs. A chunk with more saves one state.
    """

    def __init__(
        self, pages: PageAllocators, slots: EntryAllocator, rows: EntryAllocator, lookahead: int, keeps: bool
    ) -> None:
        page_size = pages.demands[0].page_size if pages.groups else 0
        windows = [demand.window for demand in pages.demands]
        tree = RadixCache(page_size, slots.total > 0, lookahead, windows, pages.are_idle)
        super().__init__(tree, pages, slots, rows)
        self.counts = CacheCounts()
        self.tier: HostTier | None = None
        self.keeps = keeps
        self.chunk_saves: StateSaves | None = None
        self.graph_tokens = 0
        self.grid = max(GRID, page_size)
        least = 1 if tree.recurrent else page_size + lookahead
        self.lost = LostReuse(self.counts, tree.recurrent, least, self.grid, tree.known_elsewhere)

    def match(self, request: Request) -> PrefixMatch:
        """The part of a waiting request that needs no computing. Nothing is locked."""
        if not self.keeps or not request.reads_cache:
            return NO_MATCH
        return self.tree.match(request.ids, request.cache_key)

    def touch(self, tokens: np.ndarray, key: CacheKey) -> int:
        """How many first tokens of a prompt [n] int32 have KV here in whole pages, with or without
        a state. Marks them as used now.
        """
        if not self.keeps or not self.tree.page_size:
            return 0
        return self.tree.touch(tokens, key)

    def holds(self, tokens: np.ndarray, key: CacheKey) -> bool:
        """True if a request that begins with these tokens [n] int32 would compute none of them."""
        return self.keeps and self.path(tokens, key)[0].length == len(tokens)

    def arrived(self, request: Request) -> PrefixMatch | None:
        """The prefix that came from elsewhere, with the cache's pages that were left out there.
        None: nothing came, or these pages have been evicted since.
        """
        found = request.arrived
        if found is None or not found.staged_from:
            return found
        known = request.ids[: found.staged_from + self.tree.lookahead]
        held, _ = self.tree.cached_pages(known, request.cache_key)
        for group, demand in enumerate(self.pages.demands):
            if demand.window is not None:
                held.pages[:, group] = 0  # all pages that the windows need have arrived
        return replace(found, pages=held.pages, node=held.node) if held.length == found.staged_from else None

    def expect(self, request: Request) -> int:
        """Call when a request begins to wait: the state that it matches is evicted last. Returns the
        length of its match.
        """
        if not self.keeps or not request.reads_cache:
            return 0
        return self.tree.expect(request.ids, request.arrival, request.cache_key).length

    def forget(self, request: Request) -> None:
        """Call when a request of `expect` no longer waits."""
        self.tree.forget(request.arrival)

    def shares(self, num_tokens: int) -> bool:
        """True if a prompt of `num_tokens` tokens may leave something for another one of the same
        tokens.
        """
        return self.keeps and num_tokens > (self.grid if self.slots.total else self.tree.page_size)

    def lock(self, match: PrefixMatch) -> None:
        """Keeps the entries of a match: for a request that holds its pages, or until `unlock`."""
        if match.node is None:
            return
        self.tree.lock(match)
        self.pages.lock(pages_of(match.pages))
        if match.tail is not None:
            self.pages.lock(pages_of(match.tail))
        self.slots.lock(() if match.state is None else (match.state,))

    def unlock(self, match: PrefixMatch) -> None:
        self.has_read(match)
        if match.node is not None:
            self.pages.unlock(pages_of(match.pages))
        self.tree.unlock(match)

    def has_read(self, match: PrefixMatch) -> PrefixMatch:
        """Unlocks the state and the tail of a match, which have been read. Returns the match without them."""
        if match.state is None:
            return match
        freed = self.tree.unlock_state(match)
        if match.tail is not None:
            self.pages.unlock(pages_of(match.tail))
        self.slots.unlock((match.state,))
        self.pages.evict(freed.pages)
        return replace(match, state=None, tail=None, tail_node=None)

    def admitted(self, request: Request, match: PrefixMatch) -> None:
        """Counts a match, and chooses where the rest of the prompt leaves states."""
        ids = request.ids[: request.prefill_end]
        if request.audits:
            request.metrics.cached_tokens = match.length
        elif not request.metrics.retractions and not request.afresh:
            request.metrics.admission_time = time.monotonic()
            self._count(request, ids, match)
        request.shared, request.save_at, request.spaced, request.answer_due = request.audits, (), range(0), UNLIMITED
        if self.keeps and self.slots.total and not request.audits:
            self._choose_places(request, ids, match)

    def _choose_places(self, request: Request, ids: np.ndarray, match: PrefixMatch) -> None:
        """A prompt leaves states at its last place on the grid, where a cached or waiting prompt leaves
        its path, at marked boundaries and after images, the last ones first."""
        prompt, parts = len(ids), self.tree.waiting.partings(ids, request.cache_key)
        ends = (prompt - 1, match.fork, *sorted({*parts, *request.boundaries}, reverse=True))
        ends += tuple(_ends_of_images(request.spans, self.grid))
        grid = dict.fromkeys([min(end, prompt - 1) // self.grid * self.grid for end in ends])
        request.save_at = tuple([end for end in grid if end > match.length][:MAX_SAVES])
        if self.chunk_saves is not None and not self.pages.has_windows:
            apart = max(SPACED, (prompt - match.length) // MOST_SPACED) // self.grid * self.grid
            request.spaced = range((match.length // apart + 1) * apart, prompt, apart)

    def last_place(self, request: Request, most: int) -> int:
        """The last place of a running prompt, at most `most`, where it leaves or can leave a state;
        0 if there is none.
        """
        on_grid, start = most // self.grid * self.grid, request.computed
        if not self.slots.total:
            return on_grid
        places = [place for place in (*request.save_at, *request.saves) if place <= most]
        places = [place for place in places if place > start or place in request.saves]
        if start < on_grid < request.prefill_end and len(request.save_at) < MAX_SAVES + MAX_FORKS:
            places.append(on_grid)
        return max(places, default=0)

    def leave_at(self, request: Request, place: int) -> None:
        """A running prompt shall leave a state at a `last_place`."""
        ahead = request.computed < place < request.prefill_end
        if self.slots.total and (ahead or place in request.saves) and place not in request.save_at:
            request.save_at = (*request.save_at, place)

    def end_for_states(self, request: Request, start: int, end: int) -> int:
        """The best end of a chunk from `start` to at most `end`: it saves no more states than a graph
        can, and few tokens follow if a graph computes them again. A chunk without a graph ends after
        a state at an even distance, if a graph can compute the rest. A chunk that ends at a place of
        `save_at` ends one token earlier, because a state can only be saved before one of the chunk's
        tokens: the next chunk then saves it.
        """
        # A chunk with an image runs without a graph, where a further state costs no step of its own.
        saves, spans = self.chunk_saves, request.spans
        if saves is not None and not any(span.start < end and start < span.start + span.length for span in spans):
            places = sorted(place for place in request.save_at if start < place < end)
            most = saves.most
            if 0 < self.graph_tokens < end - start:
                most, last = 1, places[-1] if places else 0
                before_last = [place for place in request.spaced if start < place < last]
                if before_last and end - before_last[-1] <= min(self.graph_tokens, REST_TOKENS):
                    end = before_last[-1] + 1
            if saves.tail is not None and end - start <= self.graph_tokens and places and places[0] + saves.tail < end:
                end = places[0] + 1
            end = min([end, *places[most : most + 1]])
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
        chunk_saves = self.chunk_saves
        if chunk_saves is not None and len(saves) < chunk_saves.most:
            spaced = self._spaced_place(request, start, end, chunk_saves) if self._has_many_slots() else None
            if spaced is not None and (slot := self.spare_slot(NewState(spaced - request.prefix.length))) is not None:
                request.saves[spaced] = slot
                saves.append((spaced - start, slot.index))
        return sorted(saves)

    def keep_one(self, request: Request, start: int, saves: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Of several states of `save` all but that at an even distance, if there is one. Its slot is free again."""
        spaced = [start + tokens for tokens, _ in saves if start + tokens not in request.save_at]
        self.slots.free([request.saves.pop(place) for place in spaced])
        return [save for save in saves if start + save[0] in request.save_at]

    def _has_many_slots(self) -> bool:
        """Whether each running prompt finds a slot for the state near its end, if one more is taken now."""
        return self.room()[1] - self._promised_slots() > self._rows.total - self._rows.num_free

    def _spaced_place(self, request: Request, start: int, end: int, saves: StateSaves) -> int | None:
        """Where a chunk leaves a state at about an even distance; None: nowhere. A chunk that ends there leaves it
        a little earlier, because a state can only be saved before one of the chunk's tokens. Even distances are
        multiples of usual sizes of chunks.
        """
        within = [place for place in request.spaced if start < place <= end and place not in request.saves]
        if not within:
            return None
        place = within[-1]
        # Later, if more tokens after it would run without a graph.
        if place == end or (self.graph_tokens and saves.tail is not None and place + saves.tail < end):
            place = (end - 1) // self.grid * self.grid
        return None if place <= start or place in request.saves else place

    def wants(self, request: Request, firsts: Sequence[int]) -> bool:
        """Whether another prompt may need computed pages before page `firsts` of each group: those
        that the next token sees at a place where the text can be left.
        """
        if not self.keeps or not self.slots.total:
            return self.keeps
        places = [place for place in request.saves if place <= request.settled]
        return any(
            demand.first_page(place) < first for demand, first in zip(self.pages.demands, firsts) for place in places
        )

    def share(self, request: Request, length: int) -> None:
        """Gives the whole pages and saved states of the first `length` computed tokens to the
        cache. They stay locked for the request.
        """
        if not self.keeps:
            return
        if self.slots.total and length == request.prefill_end:
            request.answer_due, request.answer_gap = length, self.answers.apart
        # The step that leaves a state within the answer at `length` may not have been read yet.
        answers = self.answers.places
        states = {k: slot for k, slot in request.saves.items() if k < length + (slot not in answers)}
        # The request still fills the page after the complete ones.
        complete = self.tree.paths.complete_pages(length)
        taken, node = self._insert(request, request.ids[:length], states, "computed", complete)
        self.pages.lock(taken.pages)
        self._end_saves(request, states, taken)
        if node.parent is not None:
            before, request.prefix = request.prefix, replace(request.prefix, node=node)
            self.tree.lock(PrefixMatch(node=node))
            self.tree.unlock(before)

    def release(self, request: Request) -> Sequence[Handle]:
        """Offers the request's entries to the cache, and unlocks the match that it started from,
        except for its pages. Returns the states that the cache has taken over.
        """
        taken = self._offer(request)
        self._end_saves(request, request.saves, taken)
        self.has_read(request.prefix)
        self.tree.unlock(request.prefix)
        request.prefix = NO_MATCH
        return taken.states

    def path(self, tokens: np.ndarray, key: CacheKey) -> tuple[PrefixMatch, list[tuple[int, Handle]]]:
        """The cached part of a text [n] int32, up to all of it, and its states as (number of
        tokens, slot) in order. Of states within answers, and of those at even distances that nobody
        has used, only the last counts. Nothing is locked.
        """
        match = self.tree.match(np.append(tokens, np.int32(-1)), key)
        nodes = [] if match.node is None else list(match.node.path)
        kept = [node for node in reversed(nodes) if node is match.node or not _is_on_trial(node)]
        return match, [(node.end, node.state) for node in kept if node.state is not None]

    def known_at(self, length: int) -> int:
        """Token ids that `length` tokens with KV need to be a prefix: without a state after them,
        the pages of a prediction head need the next token too.
        """
        return length if self.tree.recurrent else length + self.tree.lookahead

    def length_of(self, num_tokens: int) -> int:
        """The length of a prefix with `num_tokens` known ids: the inverse of `known_at`."""
        return num_tokens if self.tree.recurrent else num_tokens - self.tree.lookahead

    def make_room(self, pages: Sequence[int], slots: int) -> bool:
        """Whether `pages` of each group and `slots` are free. Evicts if they are not."""
        return not any(self.room_left.shortages([*pages, slots])) or self.evict_for(pages, slots)

    def reset(self) -> bool:
        """Evicts everything that no request reads. False if something is left."""
        self.lost.texts.clear()
        if self.tier is not None:
            self.tier.clear("reset")
        self.evict([group.total for group in self.pages.groups], self.slots.total, why="reset")
        return not self.pages.num_cached and not self.slots.num_cached

    def subscribe(self, limit: int) -> CacheSubscription:
        """Later events of all tiers, after the present contents."""
        trees = [self.tree] if self.tier is None else [self.tree, self.tier.tree]
        return self.tree.events.subscribe([(tree.present(), tree.tier) for tree in trees], limit)

    def counters(self) -> dict[str, int]:
        """Fields of EngineCounters."""
        held = {} if self.tier is None else {
            "host_pages": self.tier.pages.num_cached, "host_states": self.tier.slots.num_cached
        }  # fmt: skip
        return held | {f"cache_{name}": value for name, value in asdict(self.counts).items()}

    def totals(self) -> dict[str, int]:
        """Fields of CacheDump: counts, and entries in main memory with their limits."""
        found = {"host_pages": 0, "host_pages_total": 0, "host_states": 0, "host_states_total": 0}
        if self.tier is not None:
            for name, pool in (("host_pages", self.tier.pages), ("host_states", self.tier.slots)):
                found |= {name: pool.num_cached, f"{name}_total": pool.total}
        return found | asdict(self.counts)

    def _count(self, request: Request, prompt: np.ndarray, match: PrefixMatch) -> None:
        """Requests that skip the match lose nothing."""
        counts, key = self.counts, request.cache_key
        request.metrics.cached_tokens = match.length if match.staged is None else match.staged_from
        counts.asked += len(prompt)
        counts.hit += request.metrics.cached_tokens
        if match.staged is not None or not self.keeps:
            return
        skipped = request.params.prompt_logprobs is not None or request.params.pooling == "mean"
        request.metrics.cache_miss = CacheMiss("skipped", 0) if skipped else self.lost.count(prompt, key, match)
        if (miss := request.metrics.cache_miss) is not None and log.isEnabledFor(logging.DEBUG):
            text = "request %s: %d of %d tokens were cached; from token %d on %d were not (%s); what helps: %s"
            size = len(prompt)
            log.debug(text, request.request_id, match.length, size, miss.token, miss.tokens, miss.why, miss.helps)
        if self.tier is not None:
            self.tier.tree.touch(prompt[: match.length], key)

    def _offer(self, request: Request) -> CacheEntries:
        """Offers all entries that a request has computed. A failed request offers none, because its state
        may be wrong."""
        computed, failed = request.computed, request.broken or request.audits or request.error is not None
        if not self.keeps or failed or computed <= request.prefix.length:
            return CacheEntries()
        ids = request.ids
        states = dict(request.saves)
        # Keep out a state that includes tokens past the end of the text: the last step may have
        # computed some.
        if request.state_slot is not None and computed <= len(ids):
            states[computed] = request.state_slot
        ids, num_pages = ids[: computed + self.tree.lookahead], request.pages.end
        return self._insert(request, ids, states, _end_of(request), num_pages)[0]

    def _insert(
        self, request: Request, ids: np.ndarray, states: dict[int, Handle], why: Why, num_pages: int
    ) -> tuple[CacheEntries, Node]:
        """Offers the first `num_pages` page sets of a request."""
        if request.prefix.node is not None and request.prefix.node.hidden:  # computed from a dropped prefix
            return CacheEntries(pages_of(no_sets(len(self.pages)))), Node(np.empty(0, np.int32), 0, no_sets(0))
        key = request.cache_key
        self.lost.texts.note(ids, key)
        own, within, kinds = request.save_at, False, dict[int, StateKind]()
        for place, slot in states.items():
            if slot in self.answers.places:
                within, kinds[place] = True, StateKind.ANSWER
            elif place in own[1:]:
                kinds[place] = StateKind.FORK
            elif place not in own and place in request.saves:
                kinds[place] = StateKind.SPACED
        sets = request.pages.shareable[:num_pages]
        taken, node = self.tree.insert(ids, sets, states, key, len(request.prompt), kinds, why)
        self.pages.to_cache(taken.pages)
        self.slots.to_cache(taken.states)
        if within:
            self.free_evicted(self.tree.thin(node, MOST))
        if self.tier is not None:
            # Once the cache has a slot and its ring is folded, the state in it is complete.
            kept = {slot for slot in (*taken.states, *request.saves.values()) if slot not in self.answers.places}
            self.tier.offer(ids, sets, {end: slot for end, slot in states.items() if slot in kept}, key)
        return taken, node

    def _end_saves(self, request: Request, states: Mapping[int, Handle], taken: CacheEntries) -> None:
        """These states have been offered to the cache: those that it has not taken are freed."""
        if not states:
            return
        self.answers.forget(states.values())
        self.slots.free([slot for slot in states.values() if slot not in taken.states])
        request.saves = {place: slot for place, slot in request.saves.items() if place not in states}


def _is_on_trial(node: Node) -> bool:
    """The state of a node was left without a prompt that needs it."""
    return node.kind is StateKind.ANSWER or (node.kind is StateKind.SPACED and not node.hits)


def _ends_of_images(spans: Sequence[Span], apart: int) -> list[int]:
    """Ends of spans, the last one first, without those that have the next span fewer than `apart` tokens later:
    other text may follow there."""
    starts = [*(span.start for span in spans[1:]), UNLIMITED]
    ends = [span.start + span.length for span in spans]
    return [end for end, following in zip(ends, starts) if following - end >= apart][::-1]


def _end_of(request: Request) -> Why:
    if request.finish_reason is None:
        return "retracted"
    return "aborted" if request.finish_reason == "abort" else "finished"
