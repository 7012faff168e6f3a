"""Lends rows, state slots and KV pages to requests, and writes into a step's plan what the device must know of it.

The ledger, for a request with `c` matched tokens (whole pages of the prefix cache) and n pages in all:

    what                  owner            from .. to                       freed by
    row                   the request      admit .. release                 release
    slot                  the request      admit .. release                 release, or the cache that took it over
    the match's state     the prefix cache locked from admit to settle      the cache's eviction, once unlocked
    pages[0 : c/page)     the prefix cache locked from admit to release     the cache's eviction, once unlocked
    pages[c/page : n)     the request      admit or grow .. release         release, or the cache that took them over
    the first of these    the request      .. settle                        settle, once out of every layer's window
    spare                 the request      settle .. extend                 extend makes them pages of later tokens

Slots are those of models with recurrent layers. The first step of a request reads the match's state and writes the
request's own slot; once that step has been consumed, the match's state is unlocked. A request whose first `c` tokens
were computed elsewhere owns all of its pages: they are copied there as it is admitted.

`release` is for a request that no launched step names any more: until the last such step has been consumed, the device
may read and write what the request holds. `release` offers it to the prefix cache first. A slot that the cache takes is
completed at the head of the next step, where the row's ring is folded into it (`donations`): no step reads it before.

`settle` frees pages that no step reads whose tokens come after the consumed ones. While the prompt still needs pages,
the request itself keeps them for later tokens: an admitted prompt never lacks pages.
"""

from collections.abc import Iterable
from dataclasses import replace

from hybridrt.engine.columns import UNLIMITED, RowColumns
from hybridrt.engine.request import Request
from hybridrt.errors import MemoryBudgetError, PoolError
from hybridrt.mem_cache.allocator import Slot, SlotAllocator
from hybridrt.mem_cache.memory_plan import MemoryPlan
from hybridrt.mem_cache.page_demand import PageDemand
from hybridrt.mem_cache.prefix_cache import CacheEntries, NoPrefixCache, PrefixCache, PrefixMatch
from hybridrt.runtime.step import Admission, PageWrite, StateCopy, StepPlan


class CacheCoordinator:
    """The three allocators of an engine and its prefix cache.

    Args:
        num_rows: requests that may run together.
        num_slots: recurrent states; 0 if the model has no recurrent layer.
        num_pages: KV pages; 0 if the model has no attention layer.
        page_size: tokens in a page.
        prefix_cache: what requests leave behind for others; None keeps nothing.
        demand: how many pages requests hold, for a model whose attention layers all have a sliding window; None: all.

    Attributes:
        columns: what a step must know of the running requests.
        donations: rows whose slots the prefix cache has taken over, for the next step to fold their rings. `launched`
            takes them off.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        prefix_cache: PrefixCache | None = None,
        demand: PageDemand | None = None,
    ) -> None:
        self.rows = SlotAllocator(num_rows, "request row")
        self.slots = SlotAllocator(num_slots, "state slot")
        self.pages = SlotAllocator(num_pages, "KV page")
        self.columns = RowColumns.allocate(num_rows)
        self.donations: list[int] = []
        self._returns = 0
        self._demand = demand or PageDemand(page_size)
        self._prefix_cache: PrefixCache = prefix_cache or NoPrefixCache()

    @classmethod
    def of(cls, plan: MemoryPlan) -> "CacheCoordinator":
        """Lends what a memory plan has."""
        return cls(plan.num_rows, plan.num_slots, plan.num_pages, plan.page_size, demand=plan.demand)

    def check_fits(self, num_tokens: int) -> None:
        """Raises MemoryBudgetError if a request of num_tokens tokens in all could not run even alone."""
        # The last token is only sampled: its KV is never written.
        need = self._demand.least(num_tokens - 1)
        if self.pages.total and need > self.pages.total:
            most = self.pages.total * self._demand.page_size + 1
            raise MemoryBudgetError(
                f"a request of {num_tokens} tokens (prompt + max_tokens) needs {need} KV pages and there are "
                f"{self.pages.total}: cut prompt + max_tokens to {most}, or raise memory_fraction"
            )

    def admit(self, request: Request, headroom: int, plan: StepPlan) -> bool:
        """Lends a row, a slot and the pages that all of the request's known tokens need at a time; `computed` then says
        how many of them need no computing. False, and nothing is taken, if too little is free or fewer than `headroom`
        pages would stay free."""
        if not self.rows.num_free:
            return False
        tokens = request.tokens
        match = request.arrived or (PrefixMatch() if request.skips_cache else self._prefix_cache.match(tokens))
        # A match may have locked the one slot that the request could have had.
        choices = [match] if match.state is None else [match, PrefixMatch()]
        if not any(self._take(request, tokens, choice, headroom) for choice in choices):
            return False
        self.settle(request, 0)
        self._plan_admission(request, plan)
        return True

    def _take(self, request: Request, tokens: list[int], match: PrefixMatch, headroom: int) -> bool:
        """Lends what a request needs beside its match. False, and nothing is taken, if too little is free."""
        self._check_match(match)
        self._lock(match.entries)
        need = self._prompt_pages(len(tokens), len(match.pages))
        if not self._make_room(need + (headroom if self.pages.total else 0), 1 if self.slots.total else 0):
            self._unlock(match.entries)
            return False
        request.prefix, request.prefill_tokens, request.arrived = match, tokens, None
        request.settled = match.length
        request.row = self.rows.alloc(1)[0]
        request.state_slot = self.slots.alloc(1)[0] if self.slots.total else None
        request.pages = [*match.pages, *self.pages.alloc(need)]
        self._fill_columns(request)
        return True

    def room(self) -> tuple[int, ...]:
        """Differs from an earlier result if something has changed that may make room for a request."""
        return self.rows.num_free, self.slots.num_free, self.pages.num_free, self._returns

    def grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Lends pages until KV of `num_tokens` tokens fits. False if there are too few: nothing is taken."""
        need = self._pages_for(num_tokens) - request.end_page
        if need <= 0:
            return True
        if not self._make_room(need, 0):
            return False
        self._append(request, self.pages.alloc(need), plan)
        return True

    def extend(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """How many of the first `num_tokens` tokens of its prompt have pages, once spare ones have become theirs. Fewer
        than wanted only while launched steps hold the window back."""
        need = self._pages_for(num_tokens) - request.end_page
        if need > 0 and request.spare:
            fresh, request.spare = request.spare[:need], request.spare[need:]
            self._append(request, fresh, plan)
        return min(num_tokens, request.end_page * self._demand.page_size) if self.pages.total else num_tokens

    def settle(self, request: Request, num_tokens: int) -> None:
        """A step that computed `num_tokens` tokens of the request has been consumed, and all before it. Takes the pages
        that no later step reads, but for those that the rest of the prompt wants."""
        request.settled += num_tokens
        if num_tokens and request.prefix.state is not None:
            self._unlock(CacheEntries(states=request.prefix.entries.states))
            request.prefix = replace(request.prefix, state=None)
            self._returns += 1
        gone = self._demand.first_page(request.settled) - request.first_page
        if gone <= 0 or not request.pages:
            return
        own = request.pages[request.borrowed_pages : gone]
        request.pages, request.first_page = request.pages[gone:], request.first_page + gone
        wanted = self._pages_for(len(request.prefill_tokens)) - request.end_page - len(request.spare)
        request.spare += own[: max(wanted, 0)]
        self.pages.free(own[max(wanted, 0) :])
        self._returns += 1

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
        own = request.pages[request.borrowed_pages :] + request.spare
        taken = self._offer(request)
        self._unlock(request.prefix.entries)
        self.pages.to_cache(taken.pages)
        self.slots.to_cache(taken.states)
        kept = set(taken.pages)
        self.pages.free([page for page in own if page not in kept])
        if taken.states:
            self.donations.append(request.row.index)
        elif request.state_slot is not None:
            self.slots.free([request.state_slot])
        self.rows.free([request.row])
        request.row = request.state_slot = request.columns = None
        request.pages, request.spare, request.prefix, request.prefill_tokens = [], [], PrefixMatch(), ()
        request.settled = request.first_page = 0
        self._returns += 1

    def _offer(self, request: Request) -> CacheEntries:
        """What the prefix cache takes of a request that is released. It is offered nothing of a request that failed,
        whose state may be wrong, nor of one whose first pages have left the window: the rest is no prefix."""
        if request.first_page or request.broken or request.error is not None:
            return CacheEntries()
        tokens, computed = request.tokens, request.computed
        # A step may have computed tokens behind the last one that counts: the state then holds them, too.
        state = request.state_slot if computed <= len(tokens) else None
        return self._prefix_cache.insert(tokens[:computed], request.pages, state, computed)

    def launched(self, plan: StepPlan) -> None:
        """The step has been launched, and with it the donations that it names."""
        del self.donations[: len(plan.donations)]

    def reclaim(self, requests: Iterable[Request]) -> None:
        """Takes everything back from all requests and the prefix cache, after a change that an exception broke off: the
        ledgers may be wrong then."""
        for request in requests:
            request.row = request.state_slot = request.columns = None
            request.pages, request.spare, request.prefix = [], [], PrefixMatch()
        self.donations.clear()
        self._prefix_cache.clear()
        for allocator in (self.rows, self.slots, self.pages):
            allocator.reclaim()
        self._returns += 1

    def check(self) -> None:
        """Raises PoolError unless free + used + cached == total in every allocator."""
        for allocator in (self.rows, self.slots, self.pages):
            allocator.check()

    def _fill_columns(self, request: Request) -> None:
        assert request.row is not None
        columns, row = self.columns, request.row.index
        request.columns = columns
        columns.computed[row] = request.prefix.length
        columns.prefill_end[row] = len(request.prefill_tokens)
        columns.output_index[row] = len(request.output)
        columns.max_output[row] = request.max_len - len(request.prompt)
        pages = self.pages.total
        columns.capacity[row] = request.end_page * self._demand.page_size if pages else UNLIMITED

    def _pages_for(self, num_tokens: int) -> int:
        return self._demand.whole(num_tokens) if self.pages.total else 0

    def _prompt_pages(self, num_tokens: int, matched: int) -> int:
        """Pages to lend to a prompt of which the cache has `matched`. Where the pool holds less than whole chunks want,
        all of it must do: the chunks get shorter."""
        return min(self._pages_for(num_tokens) - matched, self._demand.prefilling(num_tokens), self.pages.total)

    def _append(self, request: Request, fresh: list[Slot], plan: StepPlan) -> None:
        assert request.row is not None
        plan.page_writes.append(PageWrite(request.row.index, request.end_page, [page.index for page in fresh]))
        request.pages += fresh
        self.columns.capacity[request.row.index] = request.end_page * self._demand.page_size

    def _make_room(self, pages: int, slots: int) -> bool:
        """Whether so many are free, once the prefix cache has given up what it can and must."""
        short = max(pages - self.pages.num_free, 0), max(slots - self.slots.num_free, 0)
        if any(short):
            gone = self._prefix_cache.evict(*short)
            self.pages.evict(gone.pages)
            self.slots.evict(gone.states)
        return pages <= self.pages.num_free and slots <= self.slots.num_free

    def _lock(self, entries: CacheEntries) -> None:
        self.pages.lock(entries.pages)
        self.slots.lock(entries.states)
        self._prefix_cache.lock(entries)

    def _unlock(self, entries: CacheEntries) -> None:
        self._prefix_cache.unlock(entries)
        self.pages.unlock(entries.pages)
        self.slots.unlock(entries.states)

    def _check_match(self, match: PrefixMatch) -> None:
        """Raises PoolError unless a match of the prefix cache has all that the model needs of it."""
        if match.staged is not None or not match.length:
            return
        held = len(match.pages) * self._demand.page_size if self.pages.total else match.length
        if held != match.length or (match.state is None) == bool(self.slots.total):
            raise PoolError(
                f"the prefix cache matched {match.length} tokens with {len(match.pages)} pages of "
                f"{self._demand.page_size} tokens and {'no' if match.state is None else 'a'} state"
            )

    def _plan_admission(self, request: Request, plan: StepPlan) -> None:
        assert request.row is not None
        row, state_slot = request.row.index, request.state_slot.index if request.state_slot else 0
        tokens = request.prefill_tokens
        settings = request.params, request.seed, request.rules
        plan.admissions.append(Admission(row, state_slot, tokens, len(request.prompt), *settings))
        if request.pages:
            plan.page_writes.append(PageWrite(row, request.first_page, [page.index for page in request.pages]))
        if request.prefix.staged is not None:
            plan.imports.append(StateCopy(row, request.computed, request.prefix.staged))
