"""What recurrent layers need of a step's prompts: chunks, and states saved within them.

States are saved in one pass, where the backends can do it, else in several.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Generic, NamedTuple

import numpy as np
from torch import Tensor

from hybridrt.base.forward_batch import ExtendPass, ForwardBatch
from hybridrt.kernels.core.chunk_plan import ChunkArrays, ChunkPlan, chunk_lists, chunk_plan
from hybridrt.kernels.core.packed import A
from hybridrt.kernels.core.records import SAVES_PER_PROMPT, SavedStates
from hybridrt.runtime.step.plan import ExtendRow


class SavedArrays(NamedTuple, Generic[A]):
    """The tensors of SavedStates: those by row, and `chunk_slots` for each chunk size."""

    row_slots: A
    row_lengths: A
    chunk_slots: tuple[A, ...]


class PassArrays(NamedTuple, Generic[A]):
    """The tensors of an ExtendPass, with its chunks for each chunk size."""

    rows: A
    read_state_slots: A
    write_state_slots: A
    query_start_loc: A
    start_positions: A
    tokens: A | None
    chunks: tuple[ChunkArrays[A], ...]


class RecurrentArrays(NamedTuple, Generic[A]):
    """What recurrent layers need of a step's extend rows: either passes, or the rest.

    Attributes:
        read_state_slots: [rows]; None: all rows start from their own slots.
        chunks: for each chunk size.
        saves: states that are saved at the ends of chunks; None without.
    """

    read_state_slots: A | None = None
    chunks: tuple[ChunkArrays[A], ...] = ()
    saves: SavedArrays[A] | None = None
    passes: tuple[PassArrays[A], ...] = ()


class Run(NamedTuple):
    """Tokens of an extend row in one pass. Slots are 0 for the row's own, -1 where nothing is
    computed."""

    row: int
    read_state_slot: int
    write_state_slot: int
    position: int
    token: int
    length: int


def recurrent_lists(extend: Sequence[ExtendRow], sizes: Sequence[int], at_chunks: bool) -> RecurrentArrays[list[int]]:
    """What an eager step packs for its recurrent layers.

    The first of several passes covers all tokens and computes each row up to its first saved state.
    Each further pass computes up to the next saved state, or the row's end.

    Args:
        sizes: chunk sizes of the backends.
        at_chunks: the backends save a state after any chunk (`saves_at_chunks`), at most
            SAVES_PER_PROMPT per row. Then one pass suffices.
    """
    saves = max([len(row.saves) for row in extend])
    if saves > (SAVES_PER_PROMPT if at_chunks else 0):
        passes = [pass_lists(runs_of(extend, number), number, sizes) for number in range(saves + 1)]
        return RecurrentArrays(passes=tuple(passes))
    return one_pass_lists(extend, sizes)


def one_pass_lists(extend: Sequence[ExtendRow], sizes: Sequence[int]) -> RecurrentArrays[list[int]]:
    """Chunk plans in which a chunk ends where a row's states are saved, at most SAVES_PER_PROMPT per row."""
    computed, new = [row.computed for row in extend], [len(row.tokens) for row in extend]
    slots = [row.read_state_slot for row in extend]
    read_state_slots = slots if any(slots) else None
    if not any([row.saves for row in extend]):
        chunks = [chunk_lists(computed, new, size) for size in sizes]
        return RecurrentArrays(read_state_slots, tuple(chunks))
    saves = [[*row.saves, *[(0, 0)] * (SAVES_PER_PROMPT - len(row.saves))] for row in extend]
    lengths, row_slots = ([[save[i] for save in of_row] for of_row in saves] for i in range(2))
    chunks = [chunk_lists(computed, new, size, lengths) for size in sizes]
    chunk_slots = []
    for plan in chunks:
        saved = [0] * len(plan.seq_idx)
        for row, start in zip(extend, accumulate(new, initial=0)):
            for length, slot in row.saves:
                saved[plan.cu_chunk_seqlens.index(start + length) - 1] = slot
        chunk_slots.append(saved)
    # Arrays of two dimensions, which their type as lists does not say.
    return RecurrentArrays(read_state_slots, tuple(chunks), SavedArrays(row_slots, lengths, tuple(chunk_slots)))  # type: ignore[arg-type]


def pass_lists(runs: Sequence[Run], number: int, sizes: Sequence[int]) -> PassArrays[list[int]]:
    positions, lengths = [run.position for run in runs], [run.length for run in runs]
    tokens = [token for run in runs for token in range(run.token, run.token + run.length)] if number else None
    return PassArrays(
        [run.row for run in runs],
        [run.read_state_slot for run in runs],
        [run.write_state_slot for run in runs],
        [0, *accumulate(lengths)],
        positions,
        tokens,
        tuple([chunk_lists(positions, lengths, size) for size in sizes]),
    )


def runs_of(extend: Sequence[ExtendRow], number: int) -> list[Run]:
    """The runs of pass `number`. Those of pass 0 cover all tokens; tokens of later passes have
    slots -1."""
    runs, first = list[Run](), 0
    for i, row in enumerate(extend):
        length = len(row.tokens)
        ends, slots = [0, *(end for end, _ in row.saves), length], [slot for _, slot in row.saves]
        if number < len(ends) - 1:
            start, end = ends[number], ends[number + 1]
            read_state_slot = slots[number - 1] if number else row.read_state_slot
            state_slots = read_state_slot, slots[number] if number < len(slots) else 0
            runs.append(Run(i, *state_slots, row.computed + start, first + start, end - start))
            if not number and end < length:
                runs.append(Run(i, -1, -1, row.computed + end, first + end, length - end))
        first += length
    return runs


def set_recurrent(
    batch: ForwardBatch,
    on_host: RecurrentArrays[np.ndarray],
    on_device: RecurrentArrays[Tensor],
    sizes: Sequence[int],
) -> None:
    """Sets a batch's fields for recurrent layers. It must have `query_lens_cpu`."""
    batch.read_state_slots = on_device.read_state_slots
    batch.chunk_plans = _chunk_plans(on_host.chunks, on_device.chunks, batch.extend_seq_lens_cpu, sizes)
    batch.extend_passes = [_extend_pass(*both, sizes) for both in zip(on_host.passes, on_device.passes)]
    if (saves := on_device.saves) is not None:
        of_sizes = zip(sizes, saves.chunk_slots)
        batch.saved_states = {size: SavedStates(slots, saves.row_slots, saves.row_lengths) for size, slots in of_sizes}


def _chunk_plans(
    on_host: Sequence[ChunkArrays[np.ndarray]],
    on_device: Sequence[ChunkArrays[Tensor]],
    new: Sequence[int],
    sizes: Sequence[int],
) -> Mapping[int, ChunkPlan]:
    return {size: chunk_plan(device, host, new, size) for size, device, host in zip(sizes, on_device, on_host)}


def _extend_pass(on_host: PassArrays[np.ndarray], part: PassArrays[Tensor], sizes: Sequence[int]) -> ExtendPass:
    lengths = np.diff(on_host.query_start_loc).tolist()
    return ExtendPass(
        part.rows, part.read_state_slots, part.write_state_slots, part.query_start_loc, part.start_positions,
        part.tokens, _chunk_plans(on_host.chunks, part.chunks, lengths, sizes),
    )  # fmt: skip
