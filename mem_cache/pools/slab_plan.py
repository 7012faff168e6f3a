"""Cuts the memory of page groups and recurrent states into slabs that they share (slabs.py).

A slab of a group has the pages of its first tensor (a layer's keys, say), then those of the next one.
Kernels see each tensor as pages without gaps, from its own first byte on, because a slab is a whole
number of such pages. A page's number is its place there, the same in all tensors of the group. Most
places are in other tensors or other groups' slabs, and no page has their numbers:

    slab             | 0, scratch | 1: three pages of the group     | 2: two of another group  | 3 ...
    memory           |            | k k k v v v k' k' k' v' v' v' - | k k v v k' k' v' v' -    |
    numbers in k     | 0          | 13 14 15                        |                          | 39 ...
    numbers in v     |       0    |       13 14 15                  |                          |       39 ...

A slab of states has whole slots, each with all tensors of all layers. Slots are padded, so that slabs
are whole numbers of slots and of pages. Kernels see a tensor's slots at equal distances, with gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from hybridrt.mem_cache.pools.host_plan import ALIGNED
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slabs import SlabShare

SLOT_PARTS = 64  # of the unit of slabs, to which slots are padded
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
        states: how state slots see them; None if the model keeps no states.
    """

    slab_bytes: int
    num_slabs: int
    groups: tuple[SlabShare, ...]
    own_pages: int = 0
    states: SlabShare | None = None

    @property
    def total(self) -> int:
        """Slabs of the buffer."""
        return 1 + self.num_slabs + sum([share.slabs(self.own_pages) for share in self.groups])

    @property
    def nbytes(self) -> int:
        return self.total * self.slab_bytes

    @property
    def slot_stride(self) -> int:
        """Bytes from a state slot to the next one."""
        return 0 if self.states is None else self.slab_bytes // self.states.apart

    @property
    def num_slots(self) -> int:
        """State slots of all slabs that may be lent."""
        return 0 if self.states is None else self.num_slabs * self.states.per_slab

    @property
    def num_slot_numbers(self) -> int:
        """Numbers of state slots, the scratch slot included."""
        return 0 if self.states is None else (self.num_slabs + 1) * self.states.apart

    def own_numbers(self, group: int) -> list[int]:
        """Numbers of the drafter's pages in a page group."""
        share, before = self.groups[group], self.groups[:group]
        first = 1 + self.num_slabs + sum([each.slabs(self.own_pages) for each in before])
        return [(first + i // share.per_slab) * share.apart + i % share.per_slab for i in range(self.own_pages)]

    def fits(self, demands: Sequence[PageDemand], num_tokens: int) -> bool:
        """Whether one request of so many tokens can run alone."""
        need = [share.slabs(demand.least(num_tokens)) for share, demand in zip(self.groups, demands)]
        return sum(need) + (self.states is not None) <= self.num_slabs


def plan_slabs(
    budget_bytes: int, page_bytes: Sequence[int], cell_bytes: Sequence[int | None], *, own_pages: int, page_size: int,
    slot_bytes: int = 0,
) -> SlabPlan | None:  # fmt: skip
    """Slabs of `budget_bytes` in all, of the size that wastes least.

    Args:
        page_bytes: of a page of each group, over its tensors.
        cell_bytes: of a page in one tensor of each group; None if keys and values differ.
        slot_bytes: of a state slot (`MambaPoolSpec.packed_slot_bytes`); 0 if there are no states.

    Returns:
        None if there are no two that could share memory, pages have no common place in slabs, or a
        token's slot would not fit into 31 bits.
    """
    cells = [cell for cell in cell_bytes if cell is not None]
    if not cells or len(cells) < len(page_bytes) or len(cells) + bool(slot_bytes) < 2:
        return None
    sizes = _slab_sizes(budget_bytes, max(page_bytes), lcm(*cells, ALIGNED if slot_bytes else 1), slot_bytes)

    def waste(size: tuple[int, int]) -> float:
        slab, slot = size
        partly_used = (len(page_bytes) + bool(slot)) * slab / (2 * budget_bytes)
        unused = sum([slab % page / slab for page in page_bytes])
        return partly_used + unused + (1 - slot_bytes / slot if slot else 0)

    slab, slot = min(sizes, key=waste)
    groups = tuple([SlabShare(slab // size, slab // cell) for size, cell in zip(page_bytes, cells)])
    states = SlabShare(slab // slot, slab // slot) if slot_bytes else None
    own = sum([share.slabs(own_pages) for share in groups])
    plan = SlabPlan(slab, budget_bytes // slab - own - 1, groups, own_pages, states)
    last_slot = max([plan.total * share.apart * page_size for share in groups])
    return plan if plan.num_slabs > 0 and last_slot < 2**31 else None


def _slab_sizes(budget_bytes: int, page_bytes: int, unit: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Possible bytes of a slab and of a padded state slot (0 without states). A slab is a whole number
    of units and of slots, and has room for `page_bytes`."""
    found = list[tuple[int, int]]()
    for parts in [n for n in range(1, SLOT_PARTS + 1) if slot_bytes and unit % (n * ALIGNED) == 0] or [1]:
        slot = -(-slot_bytes // (unit // parts)) * (unit // parts)
        step = lcm(slot, unit) if slot else unit
        first = max(-(-page_bytes // step), budget_bytes // (MOST_SLABS * step), 1)
        last = max(min(first + TRIED, budget_bytes // (FEWEST_SLABS * step)), first)
        found += [(n * step, slot) for n in range(first, last + 1)]
    return found
