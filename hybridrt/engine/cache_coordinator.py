"""Lends rows, state slots and KV pages to requests, and writes into a step's plan what the device must know of it.

The ledger, for a request with `c` matched tokens (whole pages of the prefix cache) and n pages in all:

    what                  owner            from .. to                       freed by
    row                   the request      admit .. release                 release
    slot                  the request      admit .. release                 release (models with recurrent layers)
    pages[0 : c/page)     the prefix cache locked from admit to release     the cache's eviction, once unlocked
    pages[c/page : n)     the request      admit or grow .. release         release, or the cache that took them over

`release` is for a request that no launched step still names: until the last such step has been consumed, the device may
read and write what the request holds.
"""

from hybridrt.engine.request import Request
from hybridrt.errors import MemoryBudgetError, PoolError
from hybridrt.mem_cache.allocator import SlotAllocator
from hybridrt.mem_cache.prefix_cache import NoPrefixCache, PrefixCache, PrefixMatch
from hybridrt.runtime.step import Admission, PageWrite, StepPlan


class CacheCoordinator:
    """The three allocators of an engine and its prefix cache.

    Args:
        num_rows: requests that may run together.
        num_slots: recurrent states; 0 if the model has no recurrent layer.
        num_pages: KV pages; 0 if the model has no attention layer.
        page_size: tokens in a page.
        prefix_cache: owns pages of `page_allocator`; None keeps nothing.
        page_allocator: the allocator that `prefix_cache` shares; None makes one.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        prefix_cache: PrefixCache | None = None,
        page_allocator: SlotAllocator | None = None,
    ) -> None:
        self.rows = SlotAllocator(num_rows, "request row")
        self.slots = SlotAllocator(num_slots, "state slot")
        self.pages = page_allocator or SlotAllocator(num_pages, "KV page")
        self._page_size = page_size
        self._prefix_cache: PrefixCache = prefix_cache or NoPrefixCache()

    def check_fits(self, num_tokens: int) -> None:
        """Raises MemoryBudgetError if a request of num_tokens tokens in all could not run even alone."""
        # The last token is only sampled: its KV is never written.
        need = self._pages_for(num_tokens - 1)
        if need > self.pages.total:
            most = self.pages.total * self._page_size + 1
            raise MemoryBudgetError(
                f"a request of {num_tokens} tokens (prompt + max_tokens) needs {need} KV pages and there are "
                f"{self.pages.total}: cut prompt + max_tokens to {most}, or raise memory_fraction"
            )

    def admit(self, request: Request, headroom: int, plan: StepPlan) -> bool:
        """Lends a row, a slot and the pages of all of the request's known tokens; `computed` then says how many of
        them need no computing. False if not all is there with `headroom` free pages left: nothing is taken."""
        if not self.rows.num_free or (self.slots.total and not self.slots.num_free):
            return False
        tokens = request.tokens
        match = self._prefix_cache.match(tokens)
        self._prefix_cache.lock(match)
        need = self._pages_for(len(tokens)) - len(match.pages)
        if not self._pages_free(need + headroom):
            self._prefix_cache.unlock(match)
            return False
        request.prefix, request.prefill_tokens, request.computed = match, tokens, match.length
        request.row = self.rows.alloc(1)[0]
        request.slot = self.slots.alloc(1)[0] if self.slots.total else None
        request.pages = [*match.pages, *self.pages.alloc(need)]
        self._plan_admission(request, plan)
        return True

    def grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Lends pages until KV of `num_tokens` tokens fits. False if there are too few: nothing is taken."""
        have = len(request.pages)
        need = self._pages_for(num_tokens) - have
        if need <= 0:
            return True
        if not self._pages_free(need):
            return False
        fresh = self.pages.alloc(need)
        request.pages += fresh
        assert request.row is not None
        plan.page_writes.append(PageWrite(request.row.index, have, [page.index for page in fresh]))
        return True

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
        own = request.pages[len(request.prefix.pages) :]
        known = request.tokens[: request.computed]
        taken = set(self._prefix_cache.insert(known, request.pages))
        self._prefix_cache.unlock(request.prefix)
        self.pages.free([page for page in own if page not in taken])
        self.rows.free([request.row])
        if request.slot is not None:
            self.slots.free([request.slot])
        request.row = request.slot = None
        request.pages, request.prefix, request.prefill_tokens, request.computed = [], PrefixMatch(), (), 0

    def check(self) -> None:
        """Raises PoolError unless free + used + cached == total in every allocator."""
        for allocator in (self.rows, self.slots, self.pages):
            allocator.check()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size) if self.pages.total else 0

    def _pages_free(self, need: int) -> bool:
        if need > self.pages.num_free:
            self._prefix_cache.evict(need - self.pages.num_free)
        return need <= self.pages.num_free

    def _plan_admission(self, request: Request, plan: StepPlan) -> None:
        assert request.row is not None
        row, slot = request.row.index, request.slot.index if request.slot else 0
        tokens = request.prefill_tokens
        plan.admissions.append(Admission(row, slot, tokens, len(request.prompt), request.params, request.seed))
        if request.pages:
            plan.page_writes.append(PageWrite(row, 0, [page.index for page in request.pages]))
