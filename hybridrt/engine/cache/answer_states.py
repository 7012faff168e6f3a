"""States that requests leave within their answer while they decode, for histories that leave the
answer there.

A copy of a state takes time, and its slot serves only such a history. So only one step in `APART`
leaves states, of all rows that are due, and their slots are given up before others. The states of
an answer are few and evenly spaced: at the limit, or if slots are short, every second one is given
up and the gap doubles. With n states, a history computes at most 1/n of the answer again.

Value compared with no such states: 16 requests that keep a random part of an answer of 500 tokens
compute 4,212 instead of 4,835 tokens of their prompts (built-in model, 4 rows, default slots).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from hybridrt.engine.request.sample_request import UNLIMITED, Request
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.runtime.step.plan import DecodeRows

APART = 128  # tokens between the first states of an answer, and between the steps that leave some
AT_ONCE = 8  # states that a step may copy
MOST = 32  # states within an answer, and within all answers of a text


class AnswerStates:
    """The states of running requests within their answers (in `Request.saves`), and when the next
    are due.

    Args:
        num_rows: request rows.
    """

    def __init__(self, num_rows: int) -> None:
        self._due_at = np.full(num_rows + 1, UNLIMITED, np.int32)  # by row: tokens before its next state
        self._gaps = np.full(num_rows + 1, APART, np.int32)  # by row: tokens between its states
        self._places = dict[Handle, tuple[Request, int]]()  # by slot, the oldest first: its request and token
        self._ahead = APART  # tokens that a row may still gain before the next step that leaves states

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, slot: object) -> bool:
        return slot in self._places

    def begin_answer(self, request: Request) -> None:
        assert request.row is not None
        self._gaps[request.row.index], self._due_at[request.row.index] = APART, request.prefill_end

    def pass_step(self, decode: DecodeRows) -> bool:
        """Call once for each step with decode rows. True if this one may leave states."""
        self._ahead -= 1 + (int(decode.num_drafts.max()) if len(decode.drafts) else 0)
        if self._ahead > 0:
            return False
        self._ahead = APART
        return True

    def leave(
        self, decode: DecodeRows, rows: Sequence[tuple[Request, int]], take: Callable[[Request, int], Handle | None]
    ) -> list[StateMove]:
        """Selects the decode rows to snapshot before this step: the most overdue first, at most
        AT_ONCE. Others wait for a later step.

        Args:
            rows: the step's requests, those of `decode` first.
            take: returns a slot for a state of a request, if there is one; the number is that of
                earlier states of the step.
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
            self._places[slot] = request, length
            request.saves[length] = slot
            self._due_at[row] = length + self._gaps[row]
            left.append(StateMove(row, request.state_slot.index, slot.index, When.BEFORE_ROWS))
        return left

    def spread(self, request: Request) -> list[Handle]:
        """Gives up every second state of a request, but not the last one; returns their slots. The
        next ones are as far apart as the remaining ones.
        """
        assert request.row is not None
        row, saves = request.row.index, request.saves
        gone = [saves.pop(length) for length in sorted(saves)[-2::-2]]
        for slot in gone:
            del self._places[slot]
        apart = (max(saves) - min(saves)) // (len(saves) - 1) if len(saves) > 1 else 0
        self._gaps[row] = max(2 * self._gaps[row], apart)
        return gone

    def give_up(self, count: int) -> list[Handle]:
        """Gives up at most `count` states, the oldest first; returns their slots."""
        slots = list(islice(self._places, count))
        for slot in slots:
            request, length = self._places.pop(slot)
            del request.saves[length]
        return slots

    def forget(self, slots: Iterable[Handle]) -> None:
        """The cache or the pool has these slots now."""
        for slot in slots:
            self._places.pop(slot, None)

    def end_answer(self, request: Request) -> None:
        """The request releases its row: nothing is due, and its states are freed with its other
        saves.
        """
        self.forget(request.saves.values())
        if request.row is not None:
            self._due_at[request.row.index] = UNLIMITED

    def clear(self) -> None:
        self._places.clear()
        self._due_at[:] = UNLIMITED
