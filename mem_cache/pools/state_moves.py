"""Moves of recurrent states in the plan of a step."""

from enum import IntEnum

import msgspec


class When(IntEnum):
    """When a step makes a move."""

    FIRST = 0  # a donation: before admissions and copies to main memory, which may read the slot
    BEFORE_ROWS = 1  # a snapshot: after the copies to main memory that the step waits for, which may read the target


class StateMove(msgspec.Struct, frozen=True, array_like=True):
    """Copies the whole state of a row, ring included, to a slot. In a donation that is the row's own
    slot, and the row owns none afterwards.

    Attributes:
        row: request row.
        source: the slot that the row owns.
        target: the slot that gets the state.
    """

    row: int
    source: int
    target: int
    when: When
