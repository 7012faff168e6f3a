"""States that prompts leave behind: at the ends of chunks in one pass, where the backends can do it, else in passes."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from hybridrt.kernels.core.chunk_plan import chunk_lists
from hybridrt.kernels.core.records import SavedStates
from hybridrt.runtime.step.pack import Columns, Sections, chunk_names
from hybridrt.runtime.step.plan import ExtendRow
from hybridrt.runtime.step.step_passes import pack_passes


def pack_saves(extend: Sequence[ExtendRow], sizes: Sequence[int], at_chunks: bool) -> Columns:
    """What an eager step packs for the states that it saves; nothing if it saves none.

    Args:
        at_chunks: the backends save a state behind any chunk (`saves_at_chunks`), one of a row. Then one pass does.
    """
    if at_chunks and any(row.saves for row in extend) and all(len(row.saves) < 2 for row in extend):
        return {name: np.array(values, np.int32) for name, values in saved_state_lists(extend, sizes).items()}
    return pack_passes(extend, sizes)


def saved_state_lists(extend: Sequence[ExtendRow], sizes: Iterable[int]) -> dict[str, list[int]]:
    """Chunk plans of these rows in which a chunk ends where a row's state is saved, and their `SavedStates`, as int32
    sections. Each row saves one state at most."""
    computed, new = [row.computed for row in extend], [len(row.tokens) for row in extend]
    saves = [row.saves[0] if row.saves else (0, 0) for row in extend]
    lengths = [length for length, _ in saves]
    lists = {"row_slots": [slot for _, slot in saves], "row_lengths": lengths}
    for size in sizes:
        plan = chunk_lists(computed, new, size, lengths)
        ends, saved = plan["cu_chunk_seqlens"], [0] * len(plan["seq_idx"])
        for (length, slot), start in zip(saves, accumulate(new, initial=0)):
            if slot:
                saved[ends.index(start + length) - 1] = slot
        lists |= {packed: plan[name] for name, packed in chunk_names(size).items()} | {f"saves of {size}": saved}
    return lists


def saved_states(sections: Sections, sizes: Sequence[int]) -> dict[int, SavedStates]:
    """By chunk size what `saved_state_lists` packed; nothing if no states are saved at the ends of chunks."""
    if "row_slots" not in sections:
        return {}
    of_rows = sections["row_slots"], sections["row_lengths"]
    return {size: SavedStates(sections[f"saves of {size}"], *of_rows) for size in sizes}
