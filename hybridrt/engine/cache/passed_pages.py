"""Takes back the pages that the windows of a request have passed, and lends them again to its prompt.

First they are offered to the prefix cache, if another prompt may need them. While the prompt still
needs pages, the request keeps as many, so an admitted prompt never lacks pages.
"""

from collections.abc import Sequence

from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageAllocators, PageDemand


class PassedPages:
    """The pages of window groups that running requests give up and keep as spare."""

    def __init__(self, pages: PageAllocators, prefixes: PrefixStore) -> None:
        self._pages, self._prefixes = pages, prefixes

    def give_up(self, request: Request) -> bool:
        """Frees the pages that the windows of all later tokens have passed, but for those that the
        request keeps as spare; unlocks those of the cache. False if there are none.
        """
        pages, firsts = request.pages, [demand.first_held(request.settled) for demand in self._pages.demands]
        passed = [max(min(first, end) - start, 0) for first, start, end in zip(firsts, pages.starts, pages.ends)]
        if not any(passed):
            return False
        spare = [
            min(max(demand.whole(request.prefill_end) - end - len(kept), 0), count)
            for demand, end, kept, count in zip(self._pages.demands, pages.ends, pages.spare, passed)
        ]
        if (request.saves or not request.shared) and self._prefixes.wants(request, firsts):
            self._prefixes.share(request, request.settled)
        gone = tuple([pages.take_passed(group, first) for group, first in enumerate(firsts)])
        own = [group.are_used(held) for group, held in zip(self._pages.groups, gone)]
        used = [held.at(mask) for held, mask in zip(gone, own)]
        self._pages.unlock(tuple([held.at(~mask) for held, mask in zip(gone, own)]))
        for kept, held, count in zip(pages.spare, used, spare):
            kept.extend(held[:count])
        self._pages.free(tuple([held[count:] for held, count in zip(used, spare)]))
        # The cache owns the other pages. It may evict as many, for the prompt.
        self._add_spare(request, [max(count - len(held), 0) for held, count in zip(used, spare)])
        return True

    def lend_spare(self, request: Request, need: Sequence[int]) -> GroupPages:
        """The request's spare pages, at most so many of each group. Lends others if `give_up` found
        too few."""
        pages = request.pages
        lent = [end - start + len(kept) for start, end, kept in zip(pages.starts, pages.ends, pages.spare)]
        may = [demand.prefilling(request.prefill_end) - count for demand, count in zip(self._pages.demands, lent)]
        self._add_spare(request, [max(min(n - len(k), m), 0) for n, k, m in zip(need, pages.spare, may)])
        return pages.take_spare(need)

    def _add_spare(self, request: Request, counts: Sequence[int]) -> None:
        store = self._prefixes
        if any(counts) and store.make_room(counts, 0):
            for kept, fresh in zip(request.pages.spare, self._pages.alloc(counts)):
                kept.extend(fresh)


def num_partial(demand: PageDemand, length: int) -> int:
    """First pages that lack tokens if a prefix came from elsewhere with only the tokens of the next
    token's window.
    """
    passed = demand.window is not None and length >= demand.window
    return demand.first_page(length) + 1 if passed else 0
