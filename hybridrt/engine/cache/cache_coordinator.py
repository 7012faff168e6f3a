"""Lends rows, state slots and KV pages to requests, and writes the resulting device work into
plans.

The ledger, for a request with a match of m pages and n pages in all:

    what                  owner            from .. to                       freed by
    row                   the request      admit .. release                 release
    slot                  the request      admit .. release                 release, or the cache that took it over
    saves                 the request      save .. share                    share, or the cache that took them over
    saves of the answer   the request      seal .. release                  release, the cache that took them over, or
                                                                            whoever needs a slot before
    match's state, tail   the prefix cache locked from admit to settle      the cache's eviction, once unlocked
    pages[0 : m)          the prefix cache locked from admit to release     the cache's eviction, once unlocked
    pages[m : n)          the request      admit or grow .. release         release, or the cache that took them over
    given (part of m : n) the prefix cache locked from share to release     the cache's eviction, once unlocked
    out of every window   the request      admit or grow .. settle          settle
    spare                 the request      settle .. use_spare_pages        use_spare_pages, for later tokens
    fetched               the fetch        start .. finish                  finish, or the cache that takes them over

Slots are those of models with recurrent layers. The first step of a request reads the match's
state, writes the request's own slot, and copies the tail into pages[m]. Once it has been consumed,
both are unlocked. A request whose first tokens were computed elsewhere owns all of its pages: they
are copied at admission.

A page is lent again only after the last step that names it was consumed. Device work may still run
then; the next owner's writes follow it on the same stream. So `release` is for a request that no
launched step names. It first offers the request's entries to the prefix cache. If the cache takes
the slot, the next step starts by folding the row's ring into it (`donations`), before anything
reads the slot.

`settle` frees pages outside the windows of all later tokens. While the prompt still needs pages,
the request keeps them, so an admitted prompt never lacks pages.
"""

from collections.abc import Callable, Iterable, Sequence

from hybridrt.base.errors import MemoryBudgetError, PoolError
from hybridrt.engine.cache.host_fetches import LOOK_AHEAD, HostFetches
from hybridrt.engine.cache.host_tier import HostTier
from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.engine.cache.window_pages import WindowPages
from hybridrt.engine.request.sample_request import UNLIMITED, Request, RowColumns
from hybridrt.kernels.core.slots import NO_SLOT
from hybridrt.mem_cache.pools.allocator import SlotAllocator
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.page_demand import PageDemand
from hybridrt.mem_cache.pools.slots import Slots
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.mem_cache.prefix_tree.prefix_cache import NO_MATCH, PrefixMatch
from hybridrt.mem_cache.prefix_tree.radix_drop import drop
from hybridrt.runtime.step.plan import Admission, PageCopy, PageWrite, StateCopy, StepPlan


class CacheCoordinator:
    """The three allocators of an engine and its prefix cache.

    Args:
        num_rows: requests that may run together.
        num_slots, num_pages: recurrent states and KV pages; 0 without such layers.
        demand: how many pages requests hold, if all attention layers have a sliding window; None:
            all.
        prefix_cache: keep the entries of ended requests. Nothing is kept if every layer is
            attention with a sliding window.
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
        num_pages: int,
        page_size: int,
        demand: PageDemand | None = None,
        *,
        prefix_cache: bool = False,
        lookahead: int = 0,
    ) -> None:
        self.rows = SlotAllocator(num_rows, "request row")
        self.slots = SlotAllocator(num_slots, "state slot")
        self.pages = SlotAllocator(num_pages, "KV page")
        self.columns = RowColumns.allocate(num_rows)
        self.donations: list[StateMove] = []
        self._num_releases = 0  # counts events that may make room
        self._demand = demand or PageDemand(page_size)
        window = self._demand.window is not None
        keeps = prefix_cache and (not window or (num_slots > 0 and not lookahead))
        windows = WindowPages(self.pages, self._demand) if keeps and window else None
        self.prefixes = PrefixStore(self.pages, self.slots, self.rows, page_size, lookahead, keeps, windows)
        self.fetches: HostFetches | None = None

    @classmethod
    def of(
        cls, plan: MemoryPlan, copied: Callable[[int], bool], *, prefix_cache: bool = False, lookahead: int = 0
    ) -> "CacheCoordinator":
        pools = plan.num_rows, plan.num_slots, plan.num_pages, plan.page_size, plan.demand
        made = cls(*pools, prefix_cache=prefix_cache, lookahead=lookahead)
        if plan.host:
            made.add_tier(plan.host.num_pages, plan.host.num_states, copied)
        return made

    def add_tier(self, num_pages: int, num_states: int, copied: Callable[[int], bool]) -> None:
        """Also keeps prefixes in main memory: so many pages and states. `copied` as
        `Executor.copied`.
        """
        store, tree = self.prefixes, self.prefixes.tree
        num_pages, num_states = num_pages if self.pages.total else 0, num_states if self.slots.total else 0
        store.tier = HostTier(num_pages, num_states, tree.page_size, tree.recurrent, tree.lookahead, copied)
        self.fetches = HostFetches(store, store.tier)

    def check_fits(self, num_tokens: int) -> None:
        """Raises MemoryBudgetError if a request of num_tokens tokens in all could not run even
        alone.
        """
        # The last token is only sampled: its KV is never written.
        need = self._demand.least(num_tokens - 1)
        if self.pages.total and need > self.pages.total:
            max_tokens = self.pages.total * self._demand.page_size + 1
            raise MemoryBudgetError(
                f"a request of {num_tokens} tokens (prompt + max_tokens) needs {need} KV pages and there are "
                f"{self.pages.total}: cut prompt + max_tokens to {max_tokens}, or raise memory_fraction"
            )

    def admit(self, request: Request, headroom: int, plan: StepPlan) -> bool:
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
            match.node is not None and self._take(request, NO_MATCH, headroom)
        )

    def _take(self, request: Request, match: PrefixMatch, headroom: int) -> bool:
        """Lends the rest of what the request needs. False, with nothing taken, if too little is
        free.
        """
        self.prefixes.lock(match)
        prefill_end = len(request.prompt) + len(request.output)
        # After a cached state, pages outside every window are not needed.
        first = self._demand.first_page(match.length) if match.state is not None else 0
        need = self._prompt_pages(prefill_end, len(match.pages) or first)
        if not self._make_room(need + (headroom if self.pages.total else 0), 1 if self.slots.total else 0):
            self.prefixes.unlock(match)
            return False
        request.prefix, request.prefill_end, request.arrived = match, prefill_end, None
        request.settled, request.first_page = match.length, first
        request.row = self.rows.alloc_one()
        request.state_slot = self.slots.alloc_one() if self.slots.total else None
        request.pages = Slots(match.pages, self.pages.alloc(need))
        self._fill_columns(request)
        self.prefixes.admitted(request, match)
        return True

    def pages_for(self, num_tokens: int) -> int:
        return self._demand.whole(num_tokens) if self.pages.total else 0

    def room_stamp(self) -> tuple[int, ...]:
        return self.rows.num_free, self.slots.num_free, self.pages.num_free, self._num_releases

    def grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Lends pages until KV of `num_tokens` tokens fits. False, with nothing taken, if there are
        too few.
        """
        need = self.pages_for(num_tokens) - request.end_page
        if need <= 0:
            return True
        if not self._try_twice(lambda: self._make_room(need, 0)):
            return False
        self._append(request, self.pages.alloc(need), plan)
        return True

    def use_spare_pages(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """Lends the request's spare pages to the first `num_tokens` tokens of its prompt. Returns
        how many of them have pages: fewer only if launched steps still read pages that the window
        will release.
        """
        need = self.pages_for(num_tokens) - request.end_page
        if need > 0 and request.spare:
            fresh, request.spare = request.spare[:need], request.spare[need:]
            self._append(request, fresh, plan)
        return min(num_tokens, request.end_page * self._demand.page_size) if self.pages.total else num_tokens

    def settle(self, request: Request, num_tokens: int) -> None:
        """Call after reading a step that computed `num_tokens` tokens. Frees pages outside every
        sliding window, but keeps in `request.spare` those that the prompt still needs. Unlocks the
        matched state. Shares the prompt once all of it has been computed: its whole pages and saves
        become the cache's.
        """
        request.settled += num_tokens
        if num_tokens and request.prefix.state is not None:
            request.prefix = self.prefixes.has_read(request.prefix)
            self._num_releases += 1
        windowed = self._demand.window is not None
        if windowed:
            self.prefixes.keep_windows(request, request.settled)
        if not request.shared and request.settled >= request.prefill_end:
            self.prefixes.share(request)
            self._num_releases += 1
        gone = self._demand.first_page(request.settled) - request.first_page if windowed else 0
        if gone <= 0 or not request.pages:
            return
        own = request.pages[:gone]
        request.pages, request.first_page = request.pages[gone:], request.first_page + gone
        wanted = self.pages_for(request.prefill_end) - request.end_page - len(request.spare)
        request.spare.extend(own[: max(wanted, 0)])
        self.pages.free(own[max(wanted, 0) :])
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
        own = request.pages[request.borrowed_pages :]
        taken = self.prefixes.release(request)
        self.pages.free(request.spare)
        self.pages.free_used(own)  # the prefix cache has the others
        if request.state_slot is not None and request.state_slot in taken.states:
            slot = request.state_slot.index
            self.donations.append(StateMove(request.row.index, slot, slot, When.FIRST))
        elif request.state_slot is not None:
            self.slots.free([request.state_slot])
        self.rows.free([request.row])
        request.row = request.state_slot = request.columns = None
        request.pages, request.spare = Slots(), Slots()
        request.settled = request.first_page = request.prefill_end = 0
        self._num_releases += 1

    def drop_prefix(self, request: Request, length: int, *, whole: bool) -> None:
        """Bans the cached entry after the first `length` tokens of a request and everything
        computed from it; with `whole`, also the entries before it.
        """
        store, tokens, salt = self.prefixes, request.ids[:length], request.params.cache_salt or ""
        if self.fetches is not None:
            self.fetches.cancel_all()  # they hold parts of the path, and would bring it back
        states = store.evicted(drop(store.tree, tokens, salt, whole=whole))
        if store.windows is not None:
            store.windows.drop(states)
        if store.tier is not None:
            store.tier.drop(tokens, salt, whole=whole)
        self._num_releases += 1

    def begin_step(self, waiting: Sequence[Request], headroom: int) -> None:
        """Call before a step is made: adopts completed fetches and starts those of the first
        waiting requests. `headroom` as for `admit`.
        """
        if self.fetches is not None:
            if self.fetches.finish():
                self._num_releases += 1
            self.fetches.start(waiting[:LOOK_AHEAD], self.room_stamp(), headroom)

    def waits(self, request: Request) -> bool:
        return self.fetches is not None and self.fetches.awaited(request)

    def seal(self, plan: StepPlan, rows: Sequence[tuple[Request, int]] = ()) -> bool:
        """Adds to a finished plan the donations, states within answers, and copies to and from main
        memory. `rows` as `ScheduledStep.rows`. True if it should be launched even without rows, for
        a fetch.
        """
        plan.moves = list(self.donations)
        if plan.decode and self.prefixes.answers.pass_step(plan.decode):
            plan.moves += self.prefixes.answers.leave(plan.decode, rows, self.prefixes.slot_within)
        if self.prefixes.windows is not None:
            plan.kept_pages = list(self.prefixes.windows.copies)
        if self.prefixes.tier is not None:
            self.prefixes.tier.seal(plan)
        return any(copy.fetch for copy in plan.host_copies)

    def launched(self, plan: StepPlan) -> None:
        del self.donations[: sum(move.donates for move in plan.moves)]
        if self.prefixes.windows is not None:
            del self.prefixes.windows.copies[: len(plan.kept_pages)]
        if self.prefixes.tier is not None:
            self.prefixes.tier.launched(plan)

    def failed(self) -> None:
        """A launch failed. It is unknown which of its copies run, so main memory is cleared."""
        if self.prefixes.windows is not None:
            self.prefixes.windows.failed()
        if self.fetches is not None and self.prefixes.tier is not None:
            self.fetches.cancel_all()
            self.prefixes.tier.clear()

    def forget_prefixes(self) -> bool:
        if self.fetches is not None:
            self.fetches.cancel_all()
        return self.prefixes.reset()

    def reclaim(self, requests: Iterable[Request]) -> None:
        """Takes everything back from all requests and the cache. Used after an exception in the
        middle of a change, when the ledgers may contradict each other.
        """
        for request in requests:
            request.row = request.state_slot = request.columns = None
            request.pages, request.spare, request.prefix = Slots(), Slots(), NO_MATCH
            request.given, request.saves = Slots(), {}
        self.donations.clear()
        self.prefixes.answers.clear()
        self.prefixes.tree.clear()
        if self.prefixes.windows is not None:
            self.prefixes.windows.clear()
        if self.fetches is not None and self.prefixes.tier is not None:
            self.fetches.clear()
            self.prefixes.tier.clear()
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
        pages = self.pages.total
        columns.capacity[row] = request.end_page * self._demand.page_size if pages else UNLIMITED

    def _prompt_pages(self, num_tokens: int, matched: int) -> int:
        """Pages to lend to a prompt with `matched` cached tokens. If the pool is too small for
        whole chunks, the prompt gets the whole pool, and shorter chunks.
        """
        return min(self.pages_for(num_tokens) - matched, self._demand.prefilling(num_tokens), self.pages.total)

    def _append(self, request: Request, fresh: Slots, plan: StepPlan) -> None:
        assert request.row is not None
        plan.page_writes.append(PageWrite(request.row.index, request.end_page, fresh.indices))
        request.pages.extend(fresh)
        self.columns.capacity[request.row.index] = request.end_page * self._demand.page_size

    def _try_twice(self, take: Callable[[], bool]) -> bool:
        """Calls `take`, if need be again after all fetches were cancelled. If all requests waited
        for each other's fetches, none would run.
        """
        return take() or (self.fetches is not None and self.fetches.cancel_all() and take())

    def _make_room(self, pages: int, slots: int) -> bool:
        """True if so many are free, after evicting what is missing. Evicts nothing if that is not
        enough.
        """
        room = self.prefixes.room()
        return pages <= room[0] and slots <= room[1] and self.prefixes.make_room(pages, slots)

    def _plan_admission(self, request: Request, plan: StepPlan) -> None:
        assert request.row is not None
        row, state_slot = request.row.index, request.state_slot.index if request.state_slot else NO_SLOT
        settings = request.params, request.seed, request.rules
        plan.admissions.append(Admission.from_prompt(row, state_slot, request.prompt, *settings, request.output))
        if request.pages:
            plan.page_writes.append(PageWrite(row, request.first_page, request.pages.indices))
        if request.prefix.tail is not None:
            own = request.pages[request.borrowed_pages]
            plan.page_copies.append(PageCopy(request.prefix.tail.index, own.index))
        for page, own in zip(window := request.prefix.window, request.pages[: len(window)]):
            plan.page_copies.append(PageCopy(page.index, own.index))
        if request.prefix.staged is not None:
            start = request.prefix.staged_from
            plan.imports.append(StateCopy(row, request.computed, request.prefix.staged, start=start))
