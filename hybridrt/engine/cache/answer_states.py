"""Which requests leave a state within their answer while they decode: for histories that leave the answer there.

A request that decodes has one state, which moves on with its tokens. A copy of it takes time of the step, and a slot
that only such a history needs. So one step in `APART` leaves states of all rows that are due, the others count down to
it, and slots are given up before those of other states. An answer has few states, evenly spaced: if it has as many as
it may, or slots are short, every second one is given up, and the next ones are twice as far apart. With n of them a
history computes 1/n of the answer again at most, wherever it leaves that: more of them would save little, and each is a
node that every later request on this path walks through.

Value compared with no such states: 16 requests that keep a random part of an answer of 500 tokens
compute 4,212 instead of 4,835 tokens of their prompts (built-in model, 4 rows, default slots).
"""

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from hybridrt.engine.request.row_columns import UNLIMITED
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.slots import Slot
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.runtime.step.plan import DecodeRows

APART = 128  # tokens between the first states of an answer, and between the steps that leave some
AT_ONCE = 8  # states that a step may copy
MOST = 32  # states within an answer, and within all answers of a text


class AnswerStates:
    """The states that running requests have left within their answers, in `Request.saves`, and when the next are due.

    Args:
        num_rows: request rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._due_at = np.full(num_rows + 1, UNLIMITED, np.int32)  # by row: tokens before its next state
        self._gaps = np.full(num_rows + 1, APART, np.int32)  # by row: tokens between its states
        self._of = dict[Slot, tuple[Request, int]]()  # by slot, the oldest first: whose it is, and after which token
        self._ahead = APART  # tokens that a row may still gain before the next step that leaves states

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, slot: object) -> bool:
        return slot in self._of

    def begin(self, request: Request) -> None:
        """A request's prompt has been computed: it leaves states from here on."""
        assert request.row is not None
        self._gaps[request.row.index], self._due_at[request.row.index] = APART, request.prefill_end

    def pass_step(self, decode: DecodeRows) -> bool:
        """Call it once for each step that has decode rows. True if this one may leave states."""
        self._ahead -= 1 + (int(decode.num_drafts.max()) if len(decode.drafts) else 0)
        if self._ahead > 0:
            return False
        self._ahead = APART
        return True

    def leave(
        self, decode: DecodeRows, rows: Sequence[tuple[Request, int]], take: Callable[[Request, int], Slot | None]
    ) -> list[StateMove]:
        """Which of a step's decode rows leave the state before the step: of those that are due, the first ones are
        those that have passed their places most. Others wait for a later step.

        Args:
            rows: the step's requests, those of `decode` first.
            take: gives a slot for a state of a request, after so many others of the same step, if there is one.
        """
        left, ahead = list[StateMove](), self._due_at[decode.rows] - decode.computed
        due = (ahead <= 0).nonzero()[0]
        if len(due) > AT_ONCE:
            due = due[ahead[due].argsort(kind="stable")][:AT_ONCE]
        for i in due.tolist():
            request, row, length = rows[i][0], int(decode.rows[i]), int(decode.computed[i])
            slot = take(request, len(left))
            if slot is None or request.state_slot is None:
                break
            self._of[slot] = request, length
            request.saves[length] = slot
            self._due_at[row] = length + self._gaps[row]
            left.append(StateMove(row, request.state_slot.index, slot.index, When.BEFORE_ROWS))
        return left

    def spread(self, request: Request) -> list[Slot]:
        """The slots of every second state of a request, which are its own no longer. The last one stays. The next ones
        are as far apart as those that are left, which may be further apart than was due."""
        assert request.row is not None
        row, saves = request.row.index, request.saves
        gone = [saves.pop(length) for length in sorted(saves)[-2::-2]]
        for slot in gone:
            del self._of[slot]
        apart = (max(saves) - min(saves)) // (len(saves) - 1) if len(saves) > 1 else 0
        self._gaps[row] = max(2 * self._gaps[row], apart)
        return gone

    def give_up(self, count: int) -> list[Slot]:
        """The slots of up to `count` states, the oldest first, which are the request's no longer."""
        slots = list(islice(self._of, count))
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
