"""Which requests leave a state within their answer while they decode: for histories that leave the answer there.

A request that decodes has one state, which moves on with its tokens. A copy of it takes time of the step, and a slot
that only such a history needs. So copies have a budget, and their slots are given up before those of other states. An
answer has few states, evenly spaced: if it has as many as it may, or slots are short, every second one is given up, and
the next ones are twice as far apart. With n of them a history computes 1/n of the answer again at most, wherever it
leaves that: more of them would save little, and each is a node that every later request on this path walks through.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from hybridrt.engine.columns import UNLIMITED
from hybridrt.engine.request import Request
from hybridrt.mem_cache.slots import Slot
from hybridrt.runtime.step import DecodeRows, Snapshot

STEPS = 4  # one state may be copied in so many steps
AT_ONCE = 4  # states that a step may copy, if the steps before it have copied none
FIRST = 4  # places on the grid between the first states: computing so few tokens again takes no longer than one
MOST = 32  # states within an answer, and within all answers of a text


class AnswerStates:
    """The states that running requests have left within their answers, in `Request.saves`, and when the next are due.

    Args:
        num_rows: request rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._due_at = np.full(num_rows + 1, UNLIMITED, np.int32)  # by row: tokens before its next state
        self._gaps = np.full(num_rows + 1, FIRST, np.int32)  # by row: places on the grid between its states
        self._of = dict[Slot, tuple[Request, int]]()  # by slot, the oldest first: whose it is, and after which token
        self._budget = STEPS * AT_ONCE
        self._ahead = 0  # no row is due before it has computed so many tokens

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, slot: object) -> bool:
        return slot in self._of

    def begin(self, request: Request, grid: int) -> None:
        """A request's prompt has been computed: it leaves states from here on."""
        assert request.row is not None
        row, self._ahead = request.row.index, 0
        self._gaps[row] = FIRST
        self._due_at[row] = (request.prefill_end - 1) // grid * grid + FIRST * grid

    def leave(
        self, decode: DecodeRows, rows: Sequence[tuple[Request, int]], grid: int,
        take: Callable[[Request, int], Slot | None],
    ) -> list[Snapshot]:  # fmt: skip
        """Call it once for each step: which of its decode rows leave the state before the step.

        Args:
            rows: the step's requests, those of `decode` first.
            take: gives a slot for a state of a request, after so many others of the same step, if there is one.
        """
        self._budget, left = self._budget + 1, list[Snapshot]()
        for i in self._due(decode) if self._ahead <= 0 and self._budget >= STEPS else ():
            self._budget -= STEPS
            request, row, length = rows[i][0], decode.rows[i], int(decode.computed[i])
            slot = take(request, len(left))
            self._due_at[row] = (length // grid + self._gaps[row]) * grid
            if slot is not None:
                assert request.row is not None and request.state_slot is not None
                self._of[slot] = request, length
                request.saves[length] = slot
                left.append(Snapshot(request.row.index, request.state_slot.index, slot.index))
        self._ahead -= 1 + (int(decode.num_drafts.max()) if len(decode.drafts) else 0)
        return left

    def _due(self, decode: DecodeRows) -> Collection[int]:
        """The rows that are at the place of their next state or have passed it, by their numbers. If they are too many,
        those go first that have passed it most; the others wait for a later step."""
        self._budget = min(self._budget, STEPS * AT_ONCE)
        ahead = self._due_at[decode.rows] - decode.computed
        due = (ahead <= 0).nonzero()[0]
        if not len(due):
            self._ahead = int(ahead.min())
        return due[np.argsort(ahead[due], kind="stable")][: self._budget // STEPS].tolist()

    def spread(self, request: Request, grid: int) -> list[Slot]:
        """The slots of every second state of a request, which are its own no longer. The last one stays. The next ones
        are as far apart as those that are left, which the budget may have put further apart than was due."""
        assert request.row is not None
        row, saves = request.row.index, request.saves
        gone = [saves.pop(length) for length in sorted(saves)[-2::-2]]
        for slot in gone:
            del self._of[slot]
        apart = (max(saves) - min(saves)) // ((len(saves) - 1) * grid) if len(saves) > 1 else 0
        self._gaps[row] = max(2 * self._gaps[row], apart)
        return gone

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
            self._due_at[request.row.index] = UNLIMITED

    def clear(self) -> None:
        """Forgets all requests."""
        self._of.clear()
        self._due_at[:] = UNLIMITED
