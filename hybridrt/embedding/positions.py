"""How many tokens each recurrent state includes: a step must continue there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.embedding.numbers import Array, Places, host_integers


@dataclass(frozen=True, eq=False)
class StepRows:
    """The real rows of a step, in the pools' numbers.

    Attributes:
        lines: [n] rows.
        starts, ends: [n] tokens of each request before and after the step.
        decodes: rows at the head that decode or verify.
        verifies: they verify drafts, some of which may not stay.
        reads: slots from which the other rows start, 0 for their own; None: all from their own.
    """

    lines: list[int]
    starts: list[int]
    ends: list[int]
    decodes: int
    verifies: bool = False
    reads: list[int] | None = None


class Positions:
    """Tokens in the state of each row after all prepared steps, and in the slots that `snapshot`
    filled.

    Unknown are states after drafts until the host says how many stay, and slots that the host
    engine filled itself. A step may begin anywhere there.

    Args:
        rows: the host engine's numbers of rows, for errors.
    """

    def __init__(self, rows: Places) -> None:
        self._rows = rows
        self._of_row: dict[int, int | StepRows] = {}  # a StepRows: not committed yet
        self._of_slot: dict[int, int] = {}
        self._ahead: list[StepRows] = []  # prepared, and not run

    def admit_rows(self, lines: Sequence[int], slots: Sequence[int]) -> None:
        self._of_row |= dict.fromkeys(lines, 0)
        self._forget(self._of_slot, slots)

    def snapshot(self, lines: Sequence[int], slots: Sequence[int]) -> None:
        self._forget(self._of_slot, slots)
        ahead = {line for step in self._ahead for line in step.lines}
        for line, slot in zip(lines, slots):
            if line not in ahead and isinstance(held := self._of_row.get(line), int):
                self._of_slot[slot] = held

    def restore(self, slots: Sequence[int], lines: Sequence[int]) -> None:
        self._forget(self._of_row, lines)
        self._of_row |= {line: self._of_slot[slot] for line, slot in zip(lines, slots) if slot in self._of_slot}

    def note(
        self, batch: ForwardBatch, lines: np.ndarray, starts: np.ndarray, ends: np.ndarray, reads: np.ndarray | None
    ) -> None:
        """Keeps the rows of a batch. Arrays as in `StepRows`, followed by padding rows."""
        own, first, last = (values[: batch.num_real].tolist() for values in (lines, starts, ends))
        slots = None if reads is None else reads.tolist()
        batch.metadata[self] = StepRows(own, first, last, batch.num_decode_rows, batch.spec_info is not None, slots)

    def step_of_batch(self, batch: ForwardBatch) -> StepRows | None:
        """The rows that `note` has kept of a batch; None without them."""
        step: StepRows | None = batch.metadata.get(self)
        return step

    def check_step(self, step: StepRows | None) -> None:
        """BackendError if a row does not continue at the end of its state. None: not known."""
        if step is None or step in self._ahead:
            return
        for i, (line, start) in enumerate(zip(step.lines, step.starts)):
            slot = step.reads[i - step.decodes] if step.reads is not None and i >= step.decodes else 0
            held = self._of_slot.get(slot) if slot else self._of_row.get(line)
            if isinstance(held, int) and held != start:
                raise BackendError(
                    f"row {self._rows.outside(line)} would continue at position {start}, but its state includes {held} "
                    "tokens; seq_lens counts each request's tokens, those of the step among them"
                )

    def prepared(self, step: StepRows | None) -> None:
        if step is not None and step not in self._ahead:
            self._ahead.append(step)
            self._of_row |= zip(step.lines, step.ends)
            if step.verifies:
                self._of_row |= dict.fromkeys(step.lines[: step.decodes], step)

    def ran(self, step: StepRows | None) -> None:
        if step in self._ahead:
            self._ahead.remove(step)

    def accepted(self, step: StepRows | None, accepted: Array) -> None:
        """Notes how many tokens of each verify row are accepted. Values on a GPU are not read."""
        if step is None or (isinstance(accepted, torch.Tensor) and accepted.device.type != "cpu"):
            return
        for line, start, kept in zip(step.lines, step.starts, host_integers("accepted", accepted).tolist()):
            if self._of_row.get(line) is step:
                self._of_row[line] = start + kept

    def drop(self, step: StepRows | None) -> None:
        """Steps that are ahead, and this one, will not be committed."""
        for dropped in (*self._ahead, *([step] if step else ())):
            self._forget(self._of_row, dropped.lines)
        self._ahead.clear()

    @staticmethod
    def _forget(table: dict[int, int] | dict[int, int | StepRows], keys: Sequence[int]) -> None:
        for key in keys:
            table.pop(key, None)
