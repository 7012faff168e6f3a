"""Which requests leave a state within their answer while they decode: for histories that leave the answer there.

A request that decodes has one state, which moves on with its tokens. A copy of it takes time of the step, and a slot
that only such a history needs. So copies have a budget, and their slots are given up before those of other states.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybridrt.engine.columns import UNLIMITED
from hybridrt.engine.request import Request
from hybridrt.mem_cache.slots import Slot
from hybridrt.runtime.step import DecodeRows, Snapshot

STEPS = 4  # one state may be copied in so many steps
SPREAD = 32  # a gap between states is longer by one place on the grid for each so many places before it
AT_ONCE = 4  # states that a step may copy, if the steps before it have copied none


class AnswerStates:
    """The states that running requests have left within their answers, in `Request.saves`, and when the next are due.

    Args:
        num_rows: request rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._last = np.full(num_rows + 1, UNLIMITED, np.int32)  # by row: the place on the grid before its last state
        self._of = dict[Slot, tuple[Request, int]]()  # by slot, the oldest first: whose it is, and after which token
        self._budget = STEPS * AT_ONCE

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, slot: object) -> bool:
        return slot in self._of

    def begin(self, request: Request, grid: int) -> None:
        """A request's prompt has been computed: it leaves states from here on."""
        assert request.row is not None
        self._last[request.row.index] = (request.prefill_end - 1) // grid

    def leave(
        self, decode: DecodeRows, rows: Sequence[tuple[Request, int]], grid: int, take: Callable[[int], Slot | None]
    ) -> list[Snapshot]:
        """Call it once for each step: which of its decode rows leave the state before the step.

        Args:
            rows: the step's requests, those of `decode` first.
            take: gives a slot for a state, after so many others of the same step, if there is one.
        """
        left = list[Snapshot]()
        for i in self._due(decode, grid):
            request, slot, length = rows[i][0], take(len(left)), int(decode.computed[i])
            if slot is not None:
                assert request.row is not None and request.state_slot is not None
                self._of[slot] = request, length
                request.saves[length] = slot
                left.append(Snapshot(request.row.index, request.state_slot.index, slot.index))
        return left

    def _due(self, decode: DecodeRows, grid: int) -> Iterator[int]:
        """The rows that are at a place on the grid or have passed one since their last state, by their numbers. If
        they are too many, those go first whose last state is furthest behind; the others wait for a later step."""
        self._budget = min(self._budget + 1, STEPS * AT_ONCE)
        if self._budget < STEPS:
            return
        places, rows = decode.computed // grid, decode.rows
        since = places - self._last[rows]
        # Gaps that grow with the text keep its nodes in the tree few: inserting walks them once for each state.
        due = (since > places // SPREAD).nonzero()[0]
        for i in due[np.argsort(-since[due], kind="stable")][: self._budget // STEPS].tolist():
            self._last[rows[i]] = places[i]
            self._budget -= STEPS
            yield i

    def give_up(self, count: int) -> list[Slot]:
        """The slots of up to `count` states, the oldest first, which are the request's no longer."""
        slots = list(self._of)[:count]
        for slot in slots:
            request, length = self._of.pop(slot)
            del request.saves[length]
        return slots

    def end(self, request: Request) -> None:
        """The request lets go of its row: nothing is due, and its states are given up with the others that it saves."""
        for slot in request.saves.values():
            self._of.pop(slot, None)
        if request.row is not None:
            self._last[request.row.index] = UNLIMITED

    def clear(self) -> None:
        """Forgets all requests."""
        self._of.clear()
        self._last[:] = UNLIMITED
