"""Chunks that leave states within them: the passes in which a step's recurrent layers compute them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from hybridrt.base.forward_batch import ExtendPass
from hybridrt.kernels.core.chunk_plan import chunk_lists
from hybridrt.runtime.step.pack import Columns, Sections, chunk_names, chunk_plans
from hybridrt.runtime.step.plan import ExtendRow

RUN_COLUMNS = ("rows", "read_state_slots", "write_state_slots", "query_start_loc", "start_positions", "tokens")


class Run(NamedTuple):
    """Tokens of an extend row that one pass computes. Slots are 0 for the row's own, -1 where nothing is computed."""

    row: int
    read_state_slot: int
    write_state_slot: int
    position: int
    token: int
    length: int


def pack_passes(extend: Sequence[ExtendRow], sizes: Iterable[int]) -> Columns:
    """The integers of all passes, each under its name and the number of the pass; nothing if no row saves a state.

    The first pass covers all tokens and computes each row up to its first saved state. Every further pass computes the
    tokens from there to the next saved state, or to the row's end.
    """
    columns: Columns = {}
    saves = max((len(row.saves) for row in extend), default=0)
    for number in range(saves + 1 if saves else 0):
        lists = run_lists(runs_of(extend, number), number, sizes)
        columns |= {name: np.array(values, np.int32) for name, values in lists.items()}
    return columns


def run_lists(runs: Sequence[Run], number: int, sizes: Iterable[int]) -> dict[str, list[int]]:
    """The integers of pass `number`."""
    position, length = [run.position for run in runs], [run.length for run in runs]
    tokens = [token for run in runs for token in range(run.token, run.token + run.length)] if number else []
    state_slots = [run.read_state_slot for run in runs], [run.write_state_slot for run in runs]
    parts = [run.row for run in runs], *state_slots, [0, *accumulate(length)], position, tokens
    lists = dict(zip(RUN_COLUMNS, parts))
    for size in sizes:
        plan = chunk_lists(position, length, size)
        lists |= {packed: plan[name] for name, packed in chunk_names(size).items()}
    return {in_pass(name, number): values for name, values in lists.items()}


def runs_of(extend: Sequence[ExtendRow], number: int) -> list[Run]:
    """The runs of pass `number`. Those of pass 0 cover all tokens; what it leaves to later passes has slots -1."""
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


def extend_passes(columns: Columns, sections: Sections, sizes: Sequence[int]) -> list[ExtendPass]:
    """The passes that `pack_passes` packed, with their tensors on the device; none if no row saves a state."""
    found = list[ExtendPass]()
    for number in count():
        if in_pass("rows", number) not in columns:
            return found
        suffix = in_pass("", number)
        host = {name.removesuffix(suffix): part for name, part in columns.items() if name.endswith(suffix)}
        device = {name.removesuffix(suffix): part for name, part in sections.items() if name.endswith(suffix)}
        lengths = np.diff(host["query_start_loc"]).tolist()
        rows, read_state_slots, write_state_slots, starts, positions, tokens = (device[name] for name in RUN_COLUMNS)
        plans, places = chunk_plans(host, device, lengths, sizes), tokens if number else None
        found.append(ExtendPass(rows, read_state_slots, write_state_slots, starts, positions, places, plans))
    return found


def in_pass(name: str, number: int) -> str:
    """What an array of a pass is packed under."""
    return f"{name} in pass {number}"
