"""KV pages of cached states, for models whose attention layers all have a sliding window."""

from collections.abc import Iterable

from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.allocator import SlotAllocator
from hybridrt.mem_cache.pools.page_demand import PageDemand
from hybridrt.mem_cache.pools.slots import Slot, Slots
from hybridrt.runtime.step.plan import PageCopy


class WindowPages:
    """Pages by state: those of the tokens before it that the next token sees.

    Requests give up pages that leave the window, so a text's pages are no path from its first
    token, and the radix tree holds none. A request that ends gives its pages to its state. A state
    within a prompt gets copies, and so does a request that hits a state. So a page belongs to one
    state, and both are evicted together.

    Attributes:
        copies: for the head of the next step, before anything writes to pages that have been freed
            since.
    """

    def __init__(self, pages: SlotAllocator, demand: PageDemand) -> None:
        self.copies: list[PageCopy] = []
        self._pages, self._demand = pages, demand
        self._of: dict[Slot, Slots] = {}
        self._spoiled: set[Slot] = set()

    def of(self, state: Slot) -> Slots | None:
        """The pages of a cached state; None if the launch that should have filled them failed."""
        return None if state in self._spoiled else self._of[state]

    def span(self, position: int) -> range:
        return range(self._demand.first_page(position), self._demand.whole(position))

    def held(self, request: Request, position: int) -> Slots:
        span = self.span(position)
        return request.pages[span.start - request.first_page : span.stop - request.first_page]

    def copy(self, request: Request, position: int) -> Slots:
        """Fresh pages for a state within the prompt, and copies that fill them. There must be room."""
        sources = self.held(request, position)
        pages = self._pages.alloc(len(sources))
        self.copies += [PageCopy(source.index, page.index) for source, page in zip(sources, pages, strict=True)]
        return pages

    def keep(self, state: Slot, pages: Slots) -> None:
        """The cache has taken a state, and takes these pages of a request."""
        self._pages.to_cache(pages)
        self._of[state] = pages

    def drop(self, states: Iterable[Slot]) -> int:
        gone = Slots(*[self._of.pop(state) for state in states])
        self._spoiled.intersection_update(self._of)
        self._pages.evict(gone)
        indices = set(gone.indices.tolist())
        self.copies = [copy for copy in self.copies if copy.target not in indices]
        return len(gone)

    def failed(self) -> None:
        """A launch failed: it is unknown which copies have run."""
        filled = {copy.target for copy in self.copies}
        self._spoiled |= {state for state, pages in self._of.items() if any(page.index in filled for page in pages)}
        self.copies.clear()

    def clear(self) -> None:
        """Forgets everything. All pages have been freed already."""
        self.copies.clear()
        self._of.clear()
        self._spoiled.clear()
