"""States that prompts leave behind: at the ends of chunks in one pass, where the backends can do it, else in passes."""

from collections.abc import Callable, Iterable, Sequence

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
    ends = int32s(row.saves[0][0] if row.saves else len(row.tokens) for row in extend)
    slots = int32s(row.saves[0][1] if row.saves else 0 for row in extend)
    new, computed = int32s(len(row.tokens) for row in extend), int32s(row.computed for row in extend)
    halves = np.stack((computed, computed + ends), 1).ravel(), np.stack((ends, new - ends), 1).ravel()
    columns: Columns = {"row_slots": slots, "row_lengths": np.where(slots > 0, ends, 0).astype(np.int32)}
    for size in sizes:
        plan = chunk_columns(*halves, size)
        plan = plan if padded_to is None else pad_chunks(plan, padded_to(size))
        first, last = (plan[name].reshape(-1, 2) for name in ("first_chunk", "last_chunk"))
        saved = np.zeros(len(plan["seq_idx"]), np.int32)
        saved[last[slots > 0, 0]] = slots[slots > 0]
        plan |= {"seq_idx": plan["seq_idx"] // 2, "first_chunk": first[:, 0].copy(), "last_chunk": last.max(1)}
        columns |= {packed: plan[name] for name, packed in chunk_names(size).items()} | {f"saves of {size}": saved}
    return columns


def saved_states(sections: Sections, sizes: Sequence[int]) -> dict[int, SavedStates]:
    """By chunk size what `pack_saved_states` packed; nothing if no states are saved at the ends of chunks."""
    if "row_slots" not in sections:
        return {}
    of_rows = sections["row_slots"], sections["row_lengths"]
    return {size: SavedStates(sections[f"saves of {size}"], *of_rows) for size in sizes}
