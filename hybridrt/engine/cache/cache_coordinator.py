"""Lends rows, state slots and KV pages to requests, and writes the resulting device work into
plans.

The ledger of each page group, for a request with a match of m pages and n pages in all:

    what                  owner            from .. to                       freed by
    row                   the request      admit .. release                 release
    slot                  the request      admit .. release                 release, or the cache that took it over
    saves                 the request      save .. share                    share, or the cache that took them over
    saves of the answer   the request      seal .. release                  release, the cache that took them over, or
                                                                            whoever needs a slot before
    match's state, tail   the prefix cache locked from admit to settle      the cache's eviction, once unlocked
    pages[0 : m)          the prefix cache locked from admit to release     the cache's eviction, once unlocked
    pages[m : n)          the request      admit or grow .. release         release, or the cache that took them over
    shared (of m : n)     the prefix cache locked from share to release     the cache's eviction, once unlocked
    passed by a window    as in its line   admit or grow .. settle          settle; the cache's are unlocked instead
    spare                 the request      settle .. use_spare_pages        use_spare_pages, for later tokens
    fetched               the fetch        start .. finish                  finish, or the cache that takes them over

"Slot" and "saves" are for models with recurrent layers. The first step of a request reads the match's
state, writes the request's own slot, and copies the tail into pages[m]. Once it has been consumed,
both are unlocked. A request whose first tokens were computed elsewhere owns all of its pages: they
are copied at admission.

A page is lent again only after the last step that names it was consumed. Device work may still run
then; the next owner's writes follow it on the same stream. So `release` is for a request that no
launched step names. It first offers the request's entries to the prefix cache. If the cache takes
the slot, the next step starts by folding the row's ring into it (`donations`), before anything
reads the slot.

`settle` gives up the pages of a window group that the windows of all later tokens have passed
(hybridrt/engine/cache/passed_pages.py).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from hybridrt.base.errors import MemoryBudgetError, PoolError
from hybridrt.engine.cache.host_fetches import LOOK_AHEAD, HostFetches
from hybridrt.engine.cache.host_tier import HostTier
from hybridrt.engine.cache.passed_pages import PassedPages, num_partial
from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.engine.request.sample_request import UNLIMITED, Request, RowColumns
from hybridrt.kernels.core.slots import NO_SLOT
from hybridrt.mem_cache.pools.entries import EntryAllocator
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.page_groups import (
    NO_PAGES,
    GroupPages,
    PageAllocators,
    PageDemand,
    RequestPages,
    matched_starts,
    no_sets,
    page_numbers,
)
from hybridrt.mem_cache.pools.slab_plan import SlabPlan
from hybridrt.mem_cache.pools.slabs import SlabAllocator, Slabs
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import NO_MATCH, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_drop import drop
from hybridrt.runtime.step.plan import Admission, PageCopy, PageWrite, StateCopy, StepPlan


class CacheCoordinator:
    """The allocators of an engine and its prefix cache.

    Args:
        num_rows: requests that may run together.
        num_slots: recurrent states; 0 without such layers.
        num_pages: KV pages of each page group; none without attention layers.
        demands: how many pages of each group requests hold.
        page_bytes: of a page of each group; None: not known.
        slabs: memory that page groups and states share; None: `num_pages` of each and `num_slots`.
        prefix_cache: keep the entries of ended requests.
        lookahead: 1 if the KV of a token depends on the next one (prediction heads), else 0.

    Attributes:
        prefixes: shared entries.
        fetches: prefixes that are copied from main memory; None without such a tier.
        columns: what a step must know of the running requests.
        donations: of rows whose slots the prefix cache has taken over; the next step folds their
            rings. `launched` removes them.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        num_pages: Sequence[int],
        demands: Sequence[PageDemand],
        *,
        prefix_cache: bool = False,
        lookahead: int = 0,
        page_bytes: Sequence[int] | None = None,
        slabs: SlabPlan | None = None,
    ) -> None:
        self.rows = EntryAllocator(num_rows, "request row")
        self.slabs = None if slabs is None else Slabs(slabs.num_slabs)
        shares = () if slabs is None else slabs.groups
        self.pages = PageAllocators(num_pages, demands, page_bytes=page_bytes, slabs=self.slabs, shares=shares)
        self.slots = (
            EntryAllocator(num_slots, "state slot")
            if self.slabs is None or slabs is None or slabs.states is None
            else SlabAllocator(self.slabs, slabs.states, "state slot", of_states=True)
        )
        self.columns = RowColumns.allocate(num_rows)
        self.donations: list[StateMove] = []
        self._num_releases = 0  # counts events that may make room
        self._page_size = demands[0].page_size if demands else 0
        self.prefixes = PrefixStore(self.pages, self.slots, self.rows, lookahead, prefix_cache)
        self._passed = PassedPages(self.pages, self.prefixes)
        self.fetches: HostFetches | None = None

    @classmethod
    def from_plan(
        cls, plan: MemoryPlan, copied: Callable[[int], bool], *, prefix_cache: bool = False, lookahead: int = 0
    ) -> "CacheCoordinator":
        """The allocators of a plan's pools. `copied` as `Executor.copied`."""
        pages, demands = [group.num_pages for group in plan.groups], [group.demand for group in plan.groups]
        made = cls(
            plan.num_rows, plan.num_slots, pages, demands, prefix_cache=prefix_cache, lookahead=lookahead,
            page_bytes=[group.page_bytes for group in plan.groups], slabs=plan.slabs,
        )  # fmt: skip
        if plan.host:
            made.add_tier(plan.host.num_pages, plan.host.num_states, copied)
        return made

    def add_tier(self, num_pages: int, num_states: int, copied: Callable[[int], bool]) -> None:
        """Also keeps prefixes in main memory: `num_pages` of each group, and `num_states`. `copied` as
        `Executor.copied`.
        """
        pages = PageAllocators([num_pages] * len(self.pages), self.pages.demands, "KV page in main memory")
        num_states = num_states if self.slots.total else 0
        shares = () if self.slabs is None else [allocator.share for allocator in self.slabs.allocators]
        self.prefixes.tier = HostTier(pages, num_states, self.prefixes.tree, copied, shares)
        self.fetches = HostFetches(self.prefixes, self.prefixes.tier)

    def check_fits(self, num_tokens: int) -> None:
        """Raises MemoryBudgetError if a request of num_tokens tokens in all could not run even
        alone.
        """
        # The last token is only sampled: its KV is never written.
        for demand, most in zip(self.pages.demands, self.pages.bounds(num_tokens - 1)):
            need = demand.least(num_tokens - 1)
            if need > most:
                max_tokens = most * demand.page_size + 1
                raise MemoryBudgetError(
                    f"a request of {num_tokens} tokens (prompt + max_tokens) needs {need} KV pages and there are "
                    f"{most}: cut prompt + max_tokens to {max_tokens}, or raise memory_fraction"
                )

    def has_free(self, num_tokens: int, requests: int) -> bool:
        """Whether `requests` requests of `num_tokens` tokens would evict nothing."""
        need = [requests * (demand.whole(num_tokens) + 1) for demand in self.pages.demands]  # one page of headroom
        short = self.prefixes.room_left.shortages([*need, requests if self.slots.total else 0])
        return self.rows.num_free >= requests and not any(short)

    def admit_request(self, request: Request, headroom: int, plan: StepPlan) -> bool:
        """Lends a row, a slot and the pages that all known tokens of the request need at a time,
        and sets `computed`. False, with nothing taken, if too little is free or fewer than
        `headroom` pages would stay free.
        """
        if not self.rows.num_free:
            return False
        if self.fetches is not None:
            self.fetches.cancel(request.arrival)  # it has waited long enough
        if not self._try_twice(lambda: self._lend(request, headroom)):
            return False
        self.settle(request, 0)
        self._plan_admission(request, plan)
        return True

    def _lend(self, request: Request, headroom: int) -> bool:
        match = self.prefixes.arrived(request) or self.prefixes.match(request)
        # Locking the match keeps its state and its last page's node from eviction. If the rest is
        # too little, go on without the match.
        return self._take(request, match, headroom) or (
            match.node is not None and self._take(request, PrefixMatch(refused=match.length), headroom)
        )

    def _take(self, request: Request, match: PrefixMatch, headroom: int) -> bool:
        """Lends the rest of the request's needs. False, with nothing taken, if too little is free."""
        self.prefixes.lock(match)
        prefill_end, groups = len(request.prompt) + len(request.output), len(self.pages)
        matched = match.pages if len(match.pages) else no_sets(groups)
        firsts = [demand.first_page(match.length) for demand in self.pages.demands]
        pages = RequestPages(matched, matched_starts(matched, firsts))
        need = [
            min(demand.whole(prefill_end) - end, demand.prefilling(prefill_end), most)
            for demand, end, most in zip(self.pages.demands, pages.ends, self.pages.bounds(prefill_end))
        ]
        if not self.prefixes.make_room([count + headroom for count in need], 1 if self.slots.total else 0):
            self.prefixes.unlock(match)
            return False
        if match.staged is not None:
            pages.partial = [num_partial(demand, match.length) for demand in self.pages.demands]
        request.prefix, request.prefill_end, request.arrived = match, prefill_end, None
        request.settled, request.pages = match.length, pages
        request.row = self.rows.alloc_one()
        request.state_slot = self.slots.alloc_one() if self.slots.total else None
        pages.append(self.pages.alloc(need))
        self._fill_columns(request)
        self.prefixes.admitted(request, match)
        return True

    def room_stamp(self) -> tuple[int, ...]:
        """Numbers that differ from earlier ones if there may be new room since."""
        return self.rows.num_free, self.slots.most_free, self.pages.num_free, self._num_releases

    def grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Lends pages until KV of `num_tokens` tokens fits. False, with nothing taken, if there are
        too few.
        """
        need = self._lacking(request, num_tokens)
        if not any(need):
            return True
        if not self._try_twice(lambda: self.prefixes.make_room(need, 0)):
            return False
        self._append(request, self.pages.alloc(need), plan)
        return True

    def use_spare_pages(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """Lends the request's spare pages to the first `num_tokens` tokens of its prompt. Returns
        how many of them have pages: fewer only if launched steps still read pages that the window
        will release.
        """
        if not self.pages.has_windows:  # admission has lent all
            return num_tokens
        fresh = self._passed.lend_spare(request, self._lacking(request, num_tokens))
        if any(map(len, fresh)):
            self._append(request, fresh, plan)
        return min(num_tokens, request.pages.whole_end * self._page_size)

    def settle(self, request: Request, num_tokens: int) -> None:
        """Call after reading a step that computed `num_tokens` tokens. Unlocks the matched state.
        Gives up pages that the windows have passed, but keeps in `request.pages.spare` as many as
        the prompt still needs. Shares the prompt once all of it has been computed: its whole pages
        and saves become the cache's.
        """
        request.settled += num_tokens
        if num_tokens and request.prefix.state is not None:
            request.prefix = self.prefixes.has_read(request.prefix)
            self._num_releases += 1
        if self.pages.has_windows:
            self._num_releases += self._passed.give_up(request)
        if not request.shared and request.settled >= request.prefill_end:
            self.prefixes.share(request, request.prefill_end)
            request.shared = True
            self._num_releases += 1

    def release(self, request: Request) -> None:
        """Takes everything back; the prefix cache may keep pages of computed tokens.

        Raises:
            PoolError: a launched step still names the request, or it holds nothing.
        """
        if request.in_flight or request.row is None:
            raise PoolError(
                f"request {request.request_id!r} cannot be released: {request.in_flight} launched steps name it, "
                f"row {request.row}"
            )
        held = request.pages.held
        locked = self.pages.cached_of(held)
        states = self.prefixes.release(request)
        self.pages.unlock(locked)
        if self.pages.has_windows:
            self.pages.free(tuple(request.pages.spare))
        self.pages.free_used(held)  # the prefix cache has the others
        if request.state_slot is not None and request.state_slot in states:
            slot = request.state_slot.index
            self.donations.append(StateMove(request.row.index, slot, slot, When.FIRST))
        elif request.state_slot is not None:
            self.slots.free([request.state_slot])
        self.rows.free([request.row])
        request.row = request.state_slot = request.columns = None
        request.pages = NO_PAGES
        request.settled = request.prefill_end = 0
        self._num_releases += 1

    def drop_prefix(self, request: Request, length: int, *, whole: bool) -> None:
        """Bans the cached entry after the first `length` tokens of a request and everything
        computed from it; with `whole`, also the entries before it.
        """
        self.drop_text(request.ids[:length], request.cache_key, whole=whole)

    def drop_text(self, tokens: np.ndarray, key: CacheKey, *, whole: bool = True) -> None:
        """Bans the cached entry after a text [n] int32 and everything computed from it; with `whole`, also
        the entries of its prefixes."""
        store = self.prefixes
        if self.fetches is not None:
            self.fetches.cancel_all()  # they hold parts of the path, and would bring it back
        store.free_evicted(drop(store.tree, tokens, key, whole=whole))
        if store.tier is not None:
            store.tier.drop(tokens, key, whole=whole)
        self._num_releases += 1

    def advance_fetches(self, waiting: Iterable[Request], headroom: int) -> None:
        """Call before a step is made, if there are `fetches`: adopts completed ones and starts those
        of the first waiting requests. `headroom` as for `admit_request`.
        """
        assert self.fetches is not None
        if self.fetches.finish():
            self._num_releases += 1
        self.fetches.start(islice(waiting, LOOK_AHEAD), self.room_stamp(), headroom)

    def waits(self, request: Request) -> bool:
        """Whether a request should wait, because a prefix of it is being copied from main memory."""
        return self.fetches is not None and self.fetches.awaited(request)

    def seal(self, plan: StepPlan, rows: Sequence[tuple[Request, int]] = ()) -> bool:
        """Adds to a finished plan the donations, states within answers, slabs to clear, and copies to
        and from main memory. `rows` as `ScheduledStep.rows`. True if it should be launched even
        without rows, for a fetch.
        """
        plan.moves = list(self.donations)
        decode, answers = plan.decode, self.prefixes.answers
        if len(decode.rows):
            answers.ahead -= 1 + (int(decode.num_drafts.max()) if len(decode.drafts) else 0)
            if answers.ahead <= 0:
                plan.moves += answers.plan_snapshots(decode, rows, self.prefixes.slot_within)
        if self.slabs is not None and self.slabs.unclean:
            plan.cleared = sorted(self.slabs.unclean)
        return self.prefixes.tier is not None and self.prefixes.tier.seal(plan)

    def launched(self, plan: StepPlan) -> None:
        """Call after a sealed plan was launched: what it carries out is no longer pending."""
        if plan.moves:
            del self.donations[: len([move for move in plan.moves if move.when is When.FIRST])]
        if self.slabs is not None and plan.cleared:
            self.slabs.unclean.difference_update(plan.cleared)
        if self.prefixes.tier is not None:
            self.prefixes.tier.launched(plan)

    def failed(self) -> None:
        """A launch failed. It is unknown which of its copies run, so main memory is cleared."""
        if self.fetches is not None and self.prefixes.tier is not None:
            self.fetches.cancel_all()
            self.prefixes.tier.clear("failed")

    def forget_prefixes(self) -> bool:
        """Evicts all cached prefixes. False if running requests still read some."""
        if self.fetches is not None:
            self.fetches.cancel_all()
        return self.prefixes.reset()

    def reclaim(self, requests: Iterable[Request]) -> None:
        """Takes everything back from all requests and the cache. Used after an exception in the
        middle of a change, when the ledgers may contradict each other.
        """
        for request in requests:
            request.row = request.state_slot = request.columns = None
            request.pages, request.prefix, request.saves = NO_PAGES, NO_MATCH, {}
        self.donations.clear()
        self.prefixes.answers.places.clear()
        self.prefixes.tree.clear("failed")
        if self.fetches is not None and self.prefixes.tier is not None:
            self.fetches.clear()
            self.prefixes.tier.clear("failed")
        for allocator in (self.rows, self.slots, self.pages):
            allocator.reclaim()
        self._num_releases += 1

    def check(self) -> None:
        """Raises PoolError unless free + used + cached == total in every allocator."""
        for allocator in (self.rows, self.slots, self.pages):
            allocator.check()
        if self.prefixes.tier is not None:
            self.prefixes.tier.check()

    def _fill_columns(self, request: Request) -> None:
        assert request.row is not None
        columns, row = self.columns, request.row.index
        request.columns = columns
        columns.computed[row] = request.prefix.length
        columns.prefill_end[row] = request.prefill_end
        columns.output_index[row] = len(request.output)
        columns.max_output[row] = request.max_len - len(request.prompt)
        columns.capacity[row] = request.pages.whole_end * self._page_size if self.pages.groups else UNLIMITED

    def _lacking(self, request: Request, num_tokens: int) -> list[int]:
        """Pages of each group that `num_tokens` tokens need and the request does not have."""
        ends = zip(self.pages.demands, request.pages.ends)
        return [max(demand.whole(num_tokens) - end, 0) for demand, end in ends]

    def _append(self, request: Request, fresh: GroupPages, plan: StepPlan) -> None:
        assert request.row is not None
        row, first = request.row.index, request.pages.append(fresh)
        plan.page_writes.append(PageWrite(row, first, page_numbers(request.pages.sets[first:])))
        self.columns.capacity[row] = request.pages.whole_end * self._page_size

    def _try_twice(self, take: Callable[[], bool]) -> bool:
        """Calls `take`, and again after cancelling all fetches: requests that all wait for each
        other's fetches would never run."""
        return take() or (self.fetches is not None and self.fetches.cancel_all() and take())

    def _plan_admission(self, request: Request, plan: StepPlan) -> None:
        assert request.row is not None
        row, state_slot = request.row.index, request.state_slot.index if request.state_slot else NO_SLOT
        settings = request.params, request.seed, request.rules
        known = request.output, request.mrope_delta
        plan.admissions.append(Admission.from_prompt(row, state_slot, request.prompt, *settings, *known))
        sets = page_numbers(request.pages.sets)
        if len(sets):
            first = min(request.pages.starts)
            plan.page_writes.append(PageWrite(row, first, sets[first:]))
        if (tail := request.prefix.tail) is not None:
            own = sets[len(request.prefix.pages)]
            plan.page_copies.append(PageCopy(page_numbers(tail)[0], own))
        if request.prefix.staged is not None:
            start = request.prefix.staged_from
            plan.imports.append(StateCopy(row, request.computed, request.prefix.staged, start=start))
