"""States that prompts leave behind: at the ends of chunks in one pass, where the backends can do it, else in passes."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np

from hybridrt.kernels.chunk_plan import chunk_columns, pad_chunks
from hybridrt.kernels.records import SavedStates
from hybridrt.runtime.step import ExtendRow, int32s
from hybridrt.runtime.step_inputs import Columns, Sections, chunk_names
from hybridrt.runtime.step_passes import pack_passes


def pack_saves(extend: Sequence[ExtendRow], sizes: Sequence[int], at_chunks: bool) -> Columns:
    """What an eager step packs for the states that it saves; nothing if it saves none.

    Args:
        at_chunks: the backends save a state behind any chunk (`saves_at_chunks`), one of a row. Then one pass does.
    """
    if at_chunks and any(row.saves for row in extend) and all(len(row.saves) < 2 for row in extend):
        return pack_saved_states(extend, sizes)
    return pack_passes(extend, sizes)


def pack_saved_states(
    extend: Sequence[ExtendRow], sizes: Iterable[int], padded_to: Callable[[int], int] | None = None
) -> Columns:
    """Chunk plans of these rows in which a chunk ends where a row's state is saved, and their `SavedStates`.

    Args:
        extend: each saves one state at most.
        padded_to: chunks of a graph, by chunk size; None: no more than the rows have.
    """
    computed, new = [row.computed for row in extend], [len(row.tokens) for row in extend]
    saves = [row.saves[0] if row.saves else (0, 0) for row in extend]
    lengths, slots = zip(*saves) if saves else ((), ())
    columns: Columns = {"row_slots": int32s(slots), "row_lengths": int32s(lengths)}
    for size in sizes:
        plan = chunk_columns(computed, new, size, lengths)
        ends = plan["cu_chunk_seqlens"].tolist()
        plan = plan if padded_to is None else pad_chunks(plan, padded_to(size))
        saved = np.zeros(len(plan["seq_idx"]), np.int32)
        for (length, slot), start in zip(saves, accumulate(new, initial=0)):
            if slot:
                saved[ends.index(start + length) - 1] = slot
        columns |= {packed: plan[name] for name, packed in chunk_names(size).items()} | {f"saves of {size}": saved}
    return columns


def saved_states(sections: Sections, sizes: Sequence[int]) -> dict[int, SavedStates]:
    """By chunk size what `pack_saved_states` packed; nothing if no states are saved at the ends of chunks."""
    if "row_slots" not in sections:
        return {}
    of_rows = sections["row_slots"], sections["row_lengths"]
    return {size: SavedStates(sections[f"saves of {size}"], *of_rows) for size in sizes}
