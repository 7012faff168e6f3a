"""Cuts the memory of page groups into slabs that they share (slabs.py).

A slab of a group has the pages of its first tensor (keys of a layer, say), then those of the next one.
Slabs are whole numbers of such pages, so kernels see each tensor as pages without gaps, from its own
first byte on. A page's number is its place there, the same in all tensors of the group. Most places of
this view are in other tensors or other groups' slabs, and no page has their numbers:

    slab             | 0, scratch | 1: three pages of the group     | 2: two of another group  | 3 ...
    memory           |            | k k k v v v k' k' k' v' v' v' - | k k v v k' k' v' v' -    |
    numbers in k     | 0          | 13 14 15                        |                          | 39 ...
    numbers in v     |       0    |       13 14 15                  |                          |       39 ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slabs import SlabShare

MOST_SLABS = 4096  # more would make the ledger slow
FEWEST_SLABS = 64  # fewer would leave too much of a partly used slab
TRIED = 256  # sizes of slabs that are compared


@dataclass(frozen=True)
class SlabPlan:
    """Slabs of one buffer.

    Attributes:
        slab_bytes: of a slab.
        num_slabs: slabs 1 to num_slabs may be lent. Slab 0 has the scratch pages.
        groups: how each page group sees them.
        own_pages: pages of each group for the drafter, in slabs after the others.
    """

    slab_bytes: int
    num_slabs: int
    groups: tuple[SlabShare, ...]
    own_pages: int = 0

    @property
    def total(self) -> int:
        """Slabs of the buffer."""
        return 1 + self.num_slabs + sum([share.slabs(self.own_pages) for share in self.groups])

    @property
    def nbytes(self) -> int:
        return self.total * self.slab_bytes

    def own_numbers(self, group: int) -> list[int]:
        """Numbers of the drafter's pages in a page group."""
        share, before = self.groups[group], self.groups[:group]
        first = 1 + self.num_slabs + sum([each.slabs(self.own_pages) for each in before])
        return [(first + i // share.per_slab) * share.apart + i % share.per_slab for i in range(self.own_pages)]

    def fits(self, demands: Sequence[PageDemand], num_tokens: int) -> bool:
        """Whether one request of so many tokens can run alone."""
        need = [share.slabs(demand.least(num_tokens)) for share, demand in zip(self.groups, demands)]
        return sum(need) <= self.num_slabs


def plan_slabs(
    budget_bytes: int, page_bytes: Sequence[int], cell_bytes: Sequence[int | None], *, own_pages: int, page_size: int
) -> SlabPlan | None:
    """Slabs of `budget_bytes` in all, of the size that wastes least.

    Args:
        page_bytes: of a page of each group, over its tensors.
        cell_bytes: of a page in one tensor of each group; None if its tensors differ.

    Returns:
        None if there are not two groups to share memory, their pages have no common place in slabs,
        or a token's slot would not fit into 31 bits.
    """
    cells = [cell for cell in cell_bytes if cell is not None]
    if len(cells) < len(page_bytes) or len(cells) < 2:
        return None
    unit = lcm(*cells)
    first = max(-(-max(page_bytes) // unit), budget_bytes // (MOST_SLABS * unit))
    last = max(min(first + TRIED, budget_bytes // (FEWEST_SLABS * unit)), first)
    sizes = [m * unit for m in range(first, last + 1)]
    slab = min(sizes, key=lambda size: sum([size % page / size for page in page_bytes]))
    groups = tuple([SlabShare(slab // size, slab // cell) for size, cell in zip(page_bytes, cells)])
    own = sum([share.slabs(own_pages) for share in groups])
    plan = SlabPlan(slab, budget_bytes // slab - own - 1, groups, own_pages)
    last_slot = max([plan.total * share.apart * page_size for share in groups])
    return plan if plan.num_slabs > 0 and last_slot < 2**31 else None
