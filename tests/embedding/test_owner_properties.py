"""Random host engines over the bookkeeping of owners, compared with a memory that says what each place holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from hybridrt.base.errors import HybridrtError
from hybridrt.embedding.numbers import Numbers, Places
from hybridrt.embedding.owners import Owners, StepUse
from hybridrt.embedding.page_owners import GroupOwners, PageOwners
from hybridrt.mem_cache.pools.page_groups import PageDemand
from tests.support.levels import draw, examples

ROWS, SLOTS, PAGES, SIZE, LENGTH = 3, 4, 7, 2, 8
Windows = tuple[int | None, ...]  # of the page groups
SOME = st.integers(0, 2**31 - 1)


def int32s(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Memory:
    """What pages, slots and page tables hold, and what each row relies on: the contents that it has written or read.

    Attributes:
        kv: by page group, page and offset. table: pages of each row by group and index.
        relies: of each row, by group and position.
    """

    kv: dict[tuple[int, int, int], object] = field(default_factory=dict)
    states: dict[int, object] = field(default_factory=dict)
    table: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    slot: dict[int, int] = field(default_factory=dict)
    relies: dict[int, dict[tuple[int, int], object]] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def admit(self, row: int, slot: int) -> None:
        self.table[row], self.relies[row], self.position[row], self.slot[row] = {}, {}, 0, slot
        self.states[slot] = row, 0

    def run(self, use: StepUse, demands: Sequence[PageDemand]) -> None:
        """Writes of all rows, then what each row has relied on must be as it was."""
        self.steps += 1
        for group, writes in enumerate(use.writes):
            for row, index, page in zip(writes.lines.tolist(), writes.indices.tolist(), writes.pages.tolist()):
                i = use.lines.tolist().index(row)
                for at in range(max(index * SIZE, int(use.starts[i])), min(index * SIZE + SIZE, int(use.ends[i]))):
                    self.kv[group, page, at % SIZE] = self.relies[row][group, at] = row, self.steps, at
        for row, start, end in zip(use.lines.tolist(), use.starts.tolist(), use.ends.tolist()):
            held, self.states[self.slot[row]] = self.states[self.slot[row]], (row, end)
            assert held == (row, start), f"row {row} at {start} runs on the state {held}"
            for group, demand in enumerate(demands):
                for at in range(demand.first_page(start) * SIZE, end):
                    if page := self.table[row].get((group, at // SIZE)):
                        now = self.kv.get((group, page, at % SIZE))
                        assert self.relies[row].setdefault((group, at), now) == now, f"row {row}: {now} at {at}"


class Host:
    """Makes the calls of a host engine. `owners` may refuse them; those that it takes change the memory."""

    def __init__(self, windows: Windows) -> None:
        self.demands = [PageDemand(SIZE, window) for window in windows]
        pages, tokens = (Places(PAGES + 1, 0),) * len(windows), (Places((PAGES + 1) * SIZE, 0),) * len(windows)
        numbers = Numbers(Places(ROWS + 1, 0), Places(SLOTS + 1, 0), pages, tokens)
        groups = [PageOwners(ROWS, LENGTH // SIZE, d, PAGES, numbers, g) for g, d in enumerate(self.demands)]
        self.owners, self.memory = Owners(ROWS, SLOTS, GroupOwners(groups), numbers), Memory()
        self.batches, self.ahead = list[StepUse](), list[StepUse]()

    def admit(self, row: int, slot: int) -> None:
        self.owners.check_free(int32s(row), int32s(slot))
        self.owners.admit_rows(int32s(row), int32s(slot))
        self.memory.admit(row, slot)

    def write(self, row: int, index: int, *pages: int) -> None:
        """A page of each group; 0, the scratch page, for a window group that has passed it."""
        ahead = self.owners.lengths_ahead()
        self.owners.pages.map(self.owners.pages.checked(int32s(row), int32s(index), int32s(*pages)[None], ahead))
        table = self.memory.table.setdefault(row, {})
        for group, page in enumerate(pages):
            if table.get((group, index)) != page:  # the host has filled the page that takes the other's place
                for at in range(index * SIZE, index * SIZE + SIZE):
                    self.memory.relies.get(row, {}).pop((group, at), None)
            table[group, index] = page

    def snapshot(self, slot: int) -> None:
        self.owners.check_free(int32s(), int32s(slot))
        self.owners.give(int32s(slot))
        self.memory.states[slot] = "a snapshot"

    def batch(self, rows: list[int], counts: list[int]) -> None:
        """Rows continue where they are; without pages for their tokens they do not."""
        self.owners.check_rows(int32s(*rows))
        starts = [self.memory.position[row] for row in rows]
        ends = [min(start + count, LENGTH) for start, count in zip(starts, counts)]
        use = self.owners.use(int32s(*rows), int32s(*starts), int32s(*ends), 0, False, int32s())
        if all(writes.pages.all() for writes in use.writes):
            self.batches.append(use)

    def prepare(self, use: StepUse) -> None:
        self.owners.check_step(use)
        if [self.memory.position[row] for row in use.lines.tolist()] != use.starts.tolist():
            return  # its states stand elsewhere, which is another check
        self.owners.prepared(use)
        self.ahead.append(use)
        self.memory.position |= zip(use.lines.tolist(), use.ends.tolist())

    def run(self) -> None:
        use = self.ahead.pop(0)
        self.owners.check_next(use)
        self.owners.ran(use)
        self.memory.run(use, self.demands)


def act(host: Host, what: int, number: int) -> None:
    def pick(count: int) -> int:
        nonlocal number
        number, found = divmod(number, count)
        return found

    if what == 0:
        host.admit(pick(ROWS) + 1, pick(SLOTS) + 1)
    elif what == 1:
        host.snapshot(pick(SLOTS) + 1)
    elif what < 5:
        host.write(pick(ROWS) + 1, pick(LENGTH // SIZE), *[pick(PAGES) + 1 for _ in host.demands])
    elif what < 8:
        rows = [row for row in range(1, ROWS + 1) if pick(2)]
        if rows:
            host.batch(rows, [pick(3) + 1 for _ in rows])
    elif what < 10 and host.batches:
        host.prepare(host.batches.pop(pick(len(host.batches))))
    elif host.ahead:
        host.run()


@examples(20, 300)
def test_no_row_runs_on_memory_that_has_changed_under_it(examples: int) -> None:
    """Whatever a host engine calls: each call is refused, or all rows find what they have written and read."""
    calls = st.lists(st.tuples(st.integers(0, 11), SOME), min_size=30, max_size=150)
    draw(examples, call_anything, st.sampled_from([(None,), (3,), (None, 3)]), calls, derandomize=True)


def call_anything(windows: Windows, calls: list[tuple[int, int]]) -> None:
    host = Host(windows)
    for what, number in calls:
        try:
            act(host, what, number)
        except HybridrtError:
            continue
    for group in host.owners.pages.groups:
        counts = np.bincount(group.page_of[group.page_of > 0], minlength=PAGES + 1)
        assert (group._users == counts).all()


@examples(15, 150)
def test_a_host_that_keeps_the_rules_is_never_refused(examples: int) -> None:
    """Requests come, share a full page of one that runs, and end without a word. Their memory is lent again at once."""
    draws = st.lists(SOME, min_size=20, max_size=120)
    draw(examples, keep_the_rules, st.sampled_from([None, 3]), draws, derandomize=True)


def keep_the_rules(window: int | None, draws: list[int]) -> None:
    host = Host((window,))
    rows, slots, pages = list(range(1, ROWS + 1)), list(range(1, SLOTS + 1)), list(range(1, PAGES + 1))
    running, lent = dict[int, list[int]](), dict[int, int]()  # by row: its pages; by page: its readers
    for number in draws:
        number, what = divmod(number, 4)
        if what == 0 and rows:
            row = rows.pop(number % len(rows))
            slot = slots.pop(number % len(slots))
            host.admit(row, slot)
            running[row] = []
            donors = [r for r in running if window is None and host.memory.position[r] >= SIZE]
            if donors and number % 3:
                page = running[donors[number % len(donors)]][0]
                host.write(row, 0, page)
                running[row].append(page)
                lent[page] += 1
                host.memory.position[row], host.memory.states[slot] = SIZE, (row, SIZE)
        elif what == 1 and running:
            row = list(running)[number % len(running)]
            for page in running.pop(row):
                lent[page] -= 1
                if not lent[page]:
                    pages.append(page)
            rows.append(row)
            slots.append(host.memory.slot[row])
        elif running:
            row = list(running)[number % len(running)]
            need = host.memory.position[row] // SIZE >= len(running[row])
            if host.memory.position[row] >= LENGTH or (need and not pages):
                continue
            if need:
                page = pages.pop(number % len(pages))
                host.write(row, len(running[row]), page)
                running[row].append(page)
                lent[page] = 1
            host.batch([row], [1])
            host.prepare(host.batches.pop())
            host.run()
