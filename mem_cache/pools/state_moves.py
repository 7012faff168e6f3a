"""Moves of recurrent state that the plan of a step contains."""

from enum import IntEnum

import msgspec


class When(IntEnum):
    """When a step makes a move."""

    FIRST = 0  # before admissions and copies to main memory, which may read the slot
    BEFORE_ROWS = 1  # after copies that the step waits for, which may read the slot, and before its rows


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """Copies the whole state of a row, ring included, to a slot.

    Attributes:
        row: request row.
        source: the slot that the row owns.
        target: if it is `source`, the row donates its slot and owns none afterwards. Otherwise the
            row keeps its state.
    """

    row: int
    source: int
    target: int
    when: When

    @property
    def donates(self) -> bool:
        return self.target == self.source
