"""Moves of recurrent state that the plan of a step names."""

from enum import IntEnum

import msgspec


class When(IntEnum):
    """When a step makes a move."""

    FIRST = 0  # before all else of the step: admissions, and copies to main memory, which may read the slot
    BEFORE_ROWS = 1  # after the copies that the step waits for, which may read the slot, and before its rows


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """The whole state of a row goes to a slot: what the row's own slot holds, then what its ring holds.

    Attributes:
        row: request row.
        source: the slot that the row owns.
        target: where the state goes. If this is `source`, the row donates its slot: it owns none from then on.
            Otherwise it keeps its state as it is.
    """

    row: int
    source: int
    target: int
    when: When

    @property
    def donates(self) -> bool:
        return self.target == self.source
