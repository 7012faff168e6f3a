"""States that requests leave within their answer while they decode, for histories that leave the
answer there.

A copy of a state takes time, and its slot serves only such a history. So only one step in `APART`
leaves states, for all rows that are due, and their slots are given up before others. The states of
an answer are few and evenly spaced: at the limit, or if slots are short, every second one is given
up and the gap doubles. With n states, a history computes at most 1/n of the answer again.

Value compared with no such states: 16 requests that keep a random part of an answer of 500 tokens
compute 4,212 instead of 4,835 tokens of their prompts (built-in model, 4 rows, default slots).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.runtime.step.plan import DecodeRows, int32s

APART = 128  # tokens between the first states of an answer, and between the steps that leave some
AT_ONCE = 8  # states that a step may copy
MOST = 32  # states within an answer, and within all answers of a text


class AnswerStates:
    """The states of running requests within their answers, which are in `Request.saves`.

    Attributes:
        places: by slot, the oldest first: its request, and the tokens before the state.
        apart: tokens between the first states of an answer, and between the steps that leave some.
        ahead: tokens that a row may still gain before the next such step.
    """

    def __init__(self) -> None:
        self.places = dict[Handle, tuple[Request, int]]()
        self.apart = self.ahead = APART

    def plan_snapshots(
        self, decode: DecodeRows, rows: Sequence[tuple[Request, int]], take: Callable[[Request, int], Handle | None]
    ) -> list[StateMove]:
        """The snapshots of decode rows that are due before this step, the most overdue first, at most
        AT_ONCE: others wait for a later step. Called once `ahead` is used up.

        Args:
            rows: the step's requests, those of `decode` first.
            take: takes a slot for a state of a request, None if there is none. Its number: how many
                snapshots the step has already.
        """
        self.ahead, left = self.apart, list[StateMove]()
        ahead = int32s(request.answer_due for request, _ in rows[: len(decode.rows)]) - decode.computed
        due = (ahead <= 0).nonzero()[0]
        if len(due) > AT_ONCE:
            due = due[ahead[due].argsort(kind="stable")][:AT_ONCE]
        for i in due.tolist():
            request, row, length = rows[i][0], int(decode.rows[i]), int(decode.computed[i])
            slot = take(request, len(left))
            if slot is None or request.state_slot is None:
                break
            self.places[slot] = request, length
            request.saves[length] = slot
            request.answer_due = length + request.answer_gap
            left.append(StateMove(row, request.state_slot.index, slot.index, When.BEFORE_ROWS))
        return left

    def spread(self, request: Request) -> list[Handle]:
        """Gives up every second state of a request, but not the last one; returns their slots. The
        next ones are as far apart as the remaining ones.
        """
        saves = request.saves
        gone = [saves.pop(length) for length in sorted(saves)[-2::-2]]
        for slot in gone:
            del self.places[slot]
        apart = (max(saves) - min(saves)) // (len(saves) - 1) if len(saves) > 1 else 0
        request.answer_gap = max(2 * request.answer_gap, apart)
        return gone

    def give_up(self, count: int) -> list[Handle]:
        """Gives up at most `count` states, the oldest first; returns their slots."""
        slots = list(islice(self.places, count))
        for slot in slots:
            request, length = self.places.pop(slot)
            del request.saves[length]
        return slots

    def forget(self, slots: Iterable[Handle]) -> None:
        """Call when the cache or the pool has taken these slots."""
        for slot in slots:
            self.places.pop(slot, None)
