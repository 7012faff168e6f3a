"""Who owns each row, state slot and KV page: checked on the host before a step runs."""

from dataclasses import dataclass

import numpy as np

from hybridrt.base.errors import BackendError, PoolError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.embedding.numbers import Numbers
from hybridrt.embedding.page_owners import GroupOwners, PagePlaces
from hybridrt.kernels.core.slots import NO_SLOT, SCRATCH

NOT_ADMITTED = -1
NOBODY = SCRATCH  # as the row that has a slot


@dataclass(frozen=True, eq=False)
class StepUse:
    """What a step names, in the pools' numbers.

    Attributes:
        lines: [n] real rows.
        tenancies: [n] the admission of each row.
        starts, ends: [n] tokens of each request before and after the step.
        decodes: rows at the head that decode or verify; `verifies`: some of their tokens may not
            stay.
        reads: [n - decodes] slots from which the other rows start, 0 for their own.
        writes: the pages of the new tokens, by page group.
    """

    lines: np.ndarray
    tenancies: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    decodes: int
    verifies: bool
    reads: np.ndarray
    writes: tuple[PagePlaces, ...]


class Owners:
    """Owners by the steps that name them.

    A row belongs to the request that was admitted last. A state slot belongs to the row that was
    admitted with it last; to none after a snapshot to it. A row that lost its slot cannot run.
    Nothing changes hands that a prepared step names until the step has run.

    Attributes:
        slot_of: [R + 1] the state slot of each row, 0 in a model without recurrent layers;
            NOT_ADMITTED.
        pages: owners of KV pages.
    """

    def __init__(self, rows: int, slots: int, pages: GroupOwners, numbers: Numbers) -> None:
        self._numbers, self.pages = numbers, pages
        self.slot_of = np.full(rows + 1, NOT_ADMITTED, np.int32)
        self._owner = np.zeros(slots + 1, np.int32)  # the row that has a slot, or NOBODY
        self._tenancy = np.zeros(rows + 1, np.int64)
        self._ahead: list[StepUse] = []

    # -- memory -------------------------------------------------------------------------------------------------

    def check_free(self, lines: np.ndarray, slots: np.ndarray) -> None:
        """PoolError if a step ahead names one of these rows or slots."""
        for step in self._ahead:
            row = np.isin(lines, step.lines)
            if row.any():
                self._refuse_ahead("row", self._numbers.rows.outside(int(lines[row.argmax()])))
            slot = np.isin(slots, (*self.slot_of[step.lines].tolist(), *step.reads.tolist())) & (slots > NO_SLOT)
            if slot.any():
                self._refuse_ahead("state slot", self._numbers.state_slots.outside(int(slots[slot.argmax()])))

    def admit_rows(self, lines: np.ndarray, slots: np.ndarray) -> None:
        old = self.slot_of[lines]
        self.give(old[self._owner[old] == lines])
        self.slot_of[lines] = slots
        self._owner[slots[slots > NO_SLOT]] = lines[slots > NO_SLOT]
        self._tenancy[lines] += 1
        self.pages.forget_rows(lines)

    def give(self, slots: np.ndarray) -> None:
        self._owner[slots[slots > NO_SLOT]] = NOBODY

    def check_rows(self, lines: np.ndarray) -> None:
        """PoolError for a row that was not admitted, or lost its state slot."""
        slots = self.slot_of[lines]
        if len(missing := np.flatnonzero(slots == NOT_ADMITTED)):
            raise PoolError(f"row {self._row(lines[missing[0]])} was not admitted: call admit first")
        lost = (slots > NO_SLOT) & (self._owner[slots] != lines)
        if not lost.any():
            return
        if len(np.unique(slots)) < len(slots):
            self._numbers.state_slots.check_once("the state slots of rows", slots)
        i = int(lost.argmax())
        owner = int(self._owner[slots[i]])
        now = f"row {self._row(owner)}" if owner else "a snapshot"
        raise PoolError(
            f"row {self._row(lines[i])} has lost state slot {self._slot(slots[i])} to {now}: a slot is free after the "
            f"last step of its row alone; admit row {self._row(lines[i])} again, and compute its request anew"
        )

    def lengths_ahead(self) -> np.ndarray:
        """[R + 1] tokens of each row after the last step ahead that names it; 0: none."""
        found = np.zeros(len(self.slot_of), np.int64)
        for step in self._ahead:
            np.maximum.at(found, step.lines, step.ends)
        return found

    # -- steps --------------------------------------------------------------------------------------------------

    def use(
        self, lines: np.ndarray, starts: np.ndarray, ends: np.ndarray, decodes: int, verifies: bool, reads: np.ndarray
    ) -> StepUse:
        """The use of a step of these rows. PoolError as `check_step`."""
        writes = self.pages.writes(lines, starts, ends)
        real = reads[: max(len(lines) - decodes, 0)]
        step = StepUse(lines, self._tenancy[lines], starts, ends, min(decodes, len(lines)), verifies, real, writes)
        self.check_step(step)
        return step

    def note(self, batch: ForwardBatch, step: StepUse) -> None:
        batch.metadata[self] = step

    def use_of_batch(self, batch: ForwardBatch) -> StepUse | None:
        """The use of a batch; None if another program has made the batch."""
        step: StepUse | None = batch.metadata.get(self)
        return step

    def check_step(self, step: StepUse | None) -> None:
        """PoolError if rows, slots or pages changed owners since the step was made."""
        if step is None or step in self._ahead:
            return
        again = self._tenancy[step.lines] != step.tenancies
        if again.any():
            row = self._row(step.lines[again.argmax()])
            raise PoolError(f"row {row} was admitted again after the batch was made: make the batch anew")
        self.check_rows(step.lines)
        self._check_reads(step)
        if self.pages.known:
            self.pages.check_pages(step.lines, step.ends, step.writes)

    def check_seen(self, step: StepUse | None) -> None:
        """PoolError if a row has no page for a token that the step sees."""
        if step is not None and step not in self._ahead and self.pages.known:
            self.pages.check_seen(step.lines, step.starts)

    def check_none_ahead(self) -> None:
        """BackendError if a step is ahead: the next one would run before it."""
        if self._ahead:
            raise BackendError("replay while a prepared step has not run: run and commit it first, or drop() it")

    def prepared(self, step: StepUse | None) -> None:
        """A checked step will run after those before it: its rows write its pages from now on."""
        if step is None or step in self._ahead:
            return
        self._ahead.append(step)
        if self.pages.known:
            self.pages.take_pages(step.lines, step.starts, step.ends, step.writes, step.decodes if step.verifies else 0)

    def check_next(self, step: StepUse | None) -> None:
        """BackendError if another step was prepared earlier and has not run."""
        if step in self._ahead[1:]:
            raise BackendError(
                "forward of a step before one that was prepared earlier: run steps in the order in which they were "
                "prepared, or drop() them"
            )

    def ran(self, step: StepUse | None) -> None:
        if step in self._ahead:
            self._ahead.remove(step)

    def drop(self) -> None:
        self._ahead.clear()

    def _check_reads(self, step: StepUse) -> None:
        if not step.reads.any():
            return
        owners = self._owner[step.reads]
        wrong = (owners > 0) & (owners != step.lines[step.decodes :][: len(owners)]) & np.isin(owners, step.lines)
        if wrong.any():
            i = int(wrong.argmax())
            raise PoolError(
                f"read_state_slots[{i}] is {self._slot(step.reads[i])}, the slot of row {self._row(owners[i])}, which "
                "the step writes: take a snapshot of that row first, and read this"
            )

    def _refuse_ahead(self, what: str, number: int) -> None:
        raise PoolError(
            f"{what} {number} is used by a step that is prepared and has not run: it is free after the forward and "
            "commit of that step, or after drop()"
        )

    def _row(self, line: int) -> int:
        return self._numbers.rows.outside(int(line))

    def _slot(self, slot: int) -> int:
        return self._numbers.state_slots.outside(int(slot))
