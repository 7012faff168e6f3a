"""Page sets: for each page index of a text, the KV pages that hold its tokens, one of each page group.

A page group has the attention layers of one window, and pages of its own. Layers without a window
are the first group. A page index has one page in each group, but a window group gives its page up
when all windows of later tokens have passed it.

Sets are an array [n, G] int64 of handles; 0 means that the group has no page there.
"""

import numpy as np

from hybridrt.mem_cache.pools.slots import Slots, indices_of

PageSets = np.ndarray
GroupPages = tuple[Slots, ...]  # pages of each group


def no_sets(groups: int, count: int = 0) -> PageSets:
    """[count, groups] sets without pages."""
    return np.zeros((count, groups), np.int64)


def pages_of(sets: PageSets) -> GroupPages:
    """The pages of sets [n, G] by group, in order."""
    return tuple([Slots.of_keys(column[column > 0]) for column in sets.T])


def page_numbers(sets: PageSets) -> np.ndarray:
    """[n, G] int32 numbers of the pages in their pools; 0, the scratch page, where there is none."""
    return indices_of(sets).astype(np.int32)


def in_every_group(numbers: np.ndarray, groups: int) -> np.ndarray:
    """[n, G] page numbers: `numbers` [n] in each page group."""
    return np.repeat(numbers[:, None], groups, 1)
