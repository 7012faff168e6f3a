"""Which KV pages each row has, and which row writes each page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrt.base.errors import PoolError
from hybridrt.embedding.numbers import Numbers
from hybridrt.mem_cache.pools.page_groups import PageDemand

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class PagePlaces:
    """Row `lines[i]` has `pages[i]` at its page index `indices[i]`; 0: no page. [m] each; each
    place once."""

    lines: np.ndarray
    indices: np.ndarray
    pages: np.ndarray


class PageOwners:
    """Owners of the pages of one page group.

    Several rows may read a page. One may write it: the last one that was given it and ran a step. A
    row that used the page before has lost it, and no step may name that row until it is admitted
    again. Rows that have ended lose their pages in the same way, since host engines do not say when
    a request ends.

    The cost of a step grows with its own pages, not with those of the pool.

    Attributes:
        page_of: [R + 1, pages of a row] int32, the page of each place; 0: none.
        known: False after tables were written on a device that is not read; then nothing is
            checked.
    """

    def __init__(
        self, rows: int, max_pages: int, demand: PageDemand, num_pages: int, numbers: Numbers, group: int = 0
    ) -> None:
        self._numbers, self._demand, self._size = numbers, demand, demand.page_size
        self._pages = numbers.pages[group]
        self.known = max_pages > 0
        self.page_of = np.zeros((rows + 1, max_pages), np.int32)
        self._writer = np.zeros(num_pages + 1, np.int32)  # row; 0: none
        self._users = np.zeros(num_pages + 1, np.int32)  # how many rows have a page
        self._sum = np.zeros(num_pages + 1, np.int64)  # sum of the rows that have a page: gives the other of two
        self._reach = np.zeros(rows + 1, np.int64)  # tokens, with prepared steps
        self._floor = np.zeros(rows + 1, np.int64)  # where its next step may begin
        self._lost = np.zeros((rows + 1, 2), np.int32)  # a lost page, and the row that has it
        self._whole = np.zeros((rows + 1, 2), np.int64)  # the page indices from .. to, which all have pages

    def forget_rows(self, lines: np.ndarray) -> None:
        for line in lines.tolist():
            self._drop(line)
        self._reach[lines] = self._floor[lines] = 0
        self._whole[lines] = 0
        self._lost[lines] = 0

    def checked(self, lines: np.ndarray, indices: np.ndarray, pages: np.ndarray, ahead: np.ndarray) -> PagePlaces:
        """Places that `map` may enter. `ahead`: [R + 1] tokens of each row after the last step that
        is prepared and has not run.

        Raises:
            PoolError: a place gets two pages, a row has the page at another place, or a step ahead
                uses the place.
        """
        new = self._once(lines, indices, pages)
        held = self.page_of[new.lines, new.indices]
        used = (held != new.pages) & (held > 0) & (new.indices * self._size < ahead[new.lines])
        if used.any():
            i = int(used.argmax())
            raise PoolError(
                f"page index {new.indices[i]} of row {self._row(new.lines[i])} gets another page, but a step that is "
                "prepared and has not run uses the one that it has: run that step first, or drop() it"
            )
        for line, index in self._held_elsewhere(new):
            if index >= self._first(line):
                raise PoolError(
                    f"page {self._page(int(self.page_of[line, index]))} of row {self._row(line)} is that of page index "
                    f"{index} already: it holds the tokens of one index; take another page"
                )
        return new

    def map(self, new: PagePlaces) -> None:
        """Enters places that `checked` has passed; 0 takes a page away. A row writes a page only
        after a step of it writes there."""
        for line, index in self._held_elsewhere(new):  # the row's window has left it
            self._unmap(np.array([line]), np.array([index]))
        self._unmap(new.lines, new.indices)
        self._whole[new.lines] = 0
        self.page_of[new.lines, new.indices] = new.pages
        real = new.pages > 0
        np.add.at(self._users, new.pages[real], 1)
        np.add.at(self._sum, new.pages[real], new.lines[real])

    def _once(self, lines: np.ndarray, indices: np.ndarray, pages: np.ndarray) -> PagePlaces:
        places, first, inverse = np.unique(_pairs(lines, indices), return_index=True, return_inverse=True)
        new = PagePlaces(lines[first], indices[first], pages[first])
        if len(places) < len(lines) and (other := new.pages[inverse] != pages).any():
            i = int(other.argmax())
            raise PoolError(f"page index {indices[i]} of row {self._row(lines[i])} gets two pages; it has one")
        real = new.pages > 0
        pairs, counts = np.unique(_pairs(new.lines[real], new.pages[real]), return_counts=True)
        if (counts > 1).any():
            pair = int(pairs[counts.argmax()])
            raise PoolError(
                f"row {self._row(pair >> 32)} gets page {self._page(pair & 0xFFFFFFFF)} at two page indices; a page "
                "holds the tokens of one"
            )
        return new

    def _held_elsewhere(self, new: PagePlaces) -> list[tuple[int, int]]:
        """Yields (row, index) of places whose page the row now gets elsewhere."""
        users = self._users[new.pages]
        maybe = (users > 1) | ((users == 1) & (self._sum[new.pages] == new.lines))
        found = list[tuple[int, int]]()
        for line in np.unique(new.lines[maybe]).tolist():
            own = new.lines == line
            held = np.isin(self.page_of[line], new.pages[own & maybe])
            held[new.indices[own]] = False
            found += [(line, index) for index in np.flatnonzero(held).tolist()]
        return found

    def writes(self, lines: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> PagePlaces:
        """The pages of the tokens from starts[i] to ends[i] of row lines[i]: [n] each."""
        if not self.known:
            return PagePlaces(*[_NONE] * 3)
        first = starts // self._size
        counts = np.where(ends > starts, (ends - 1) // self._size + 1 - first, 0)
        if (counts == 1).all():
            owners, indices = lines, first
        else:
            owners, before = np.repeat(lines, counts), np.cumsum(counts) - counts
            indices = np.repeat(first - before, counts) + np.arange(len(owners))
        return PagePlaces(owners, indices, self.page_of[owners, indices])

    def check_pages(self, lines: np.ndarray, ends: np.ndarray, writes: PagePlaces) -> None:
        """PoolError: a row has lost a page, its table has changed since `writes` was made, or
        another row of the step uses a page that this one writes."""
        lost = self._lost[lines, 0]
        if lost.any():
            self._refuse_lost(int(lines[lost.argmax()]))
        now = self.page_of[writes.lines, writes.indices]
        if not np.array_equal(now, writes.pages):
            i = int((now != writes.pages).argmax())
            raise PoolError(
                f"page index {writes.indices[i]} of row {self._row(writes.lines[i])} has another page than when the "
                "batch was made: make the batch anew after write_pages"
            )
        for line, page in self._contended(writes, lines):
            for other in self._others(line, page):
                end = int(ends[lines == other].sum())  # 0 for a row without a place
                if (self.page_of[other, self._first(other) : -(-end // self._size)] == page).any():
                    raise PoolError(
                        f"rows {self._row(line)} and {self._row(other)} of the step have page {self._page(page)}, and "
                        f"row {self._row(line)} writes it: rows may share a page once it is full; give one of them "
                        "another page"
                    )

    def check_seen(self, lines: np.ndarray, starts: np.ndarray) -> None:
        """PoolError: a row whose step begins at starts[i] has no page for a token that it sees."""
        ends = -(-starts // self._size)
        window = self._demand.window
        firsts = np.zeros_like(ends) if window is None else np.maximum(starts - window + 1, 0) // self._size
        own = self._whole[lines]
        for i in np.flatnonzero((firsts < own[:, 0]) | (ends > own[:, 1])).tolist():
            line, first = int(lines[i]), int(firsts[i])
            missing = np.flatnonzero(self.page_of[line, first : ends[i]] == 0)
            if len(missing):
                raise PoolError(
                    f"row {self._row(line)} has no page for page index {first + int(missing[0])}, and its token at "
                    f"position {starts[i]} sees it: call write_pages, with the scratch page only before the window"
                )
            self._whole[line] = first, ends[i]

    def take_pages(
        self, lines: np.ndarray, starts: np.ndarray, ends: np.ndarray, writes: PagePlaces, rolls_back: int
    ) -> None:
        """The rows of a checked step write these pages from now on. The first `rolls_back` rows keep at
        least one token of the step, the others keep all."""
        for line, page in self._contended(writes):
            for other in self._others(line, page):
                self._take_from(other, page, line)
        self._writer[writes.pages] = writes.lines
        self._reach[lines] = ends
        self._floor[lines] = ends
        self._floor[lines[:rolls_back]] = starts[:rolls_back] + 1

    def _contended(self, writes: PagePlaces, among: np.ndarray | None = None) -> list[tuple[int, int]]:
        """Finds (row, page) that other rows have; `among`: the only possible ones."""
        shared = np.flatnonzero((self._users[writes.pages] > 1) & (writes.pages > 0))
        if not len(shared):
            return []
        lines, pages = writes.lines[shared], writes.pages[shared]
        if among is not None:
            maybe = (self._users[pages] > 2) | np.isin(self._sum[pages] - lines, among)
            lines, pages = lines[maybe], pages[maybe]
        return list(zip(lines.tolist(), pages.tolist()))

    def _others(self, line: int, page: int) -> list[int]:
        if self._users[page] == 2:
            return [int(self._sum[page]) - line]
        return [] if self._users[page] < 2 else [
            other for other in np.flatnonzero((self.page_of == page).any(1)).tolist() if other != line
        ]  # fmt: skip

    def _take_from(self, other: int, page: int, line: int) -> None:
        """Row `line` writes the page. Row `other` loses it if a step of it used it in its window."""
        index = int((self.page_of[other] == page).argmax())
        if index < self._first(other):
            self._unmap(np.array([other]), np.array([index]))
        elif index * self._size < self._reach[other]:
            self._lost[other] = page, line
            self._drop(other)

    def _drop(self, line: int) -> None:
        places = np.flatnonzero(self.page_of[line])
        self._unmap(np.full(len(places), line), places)

    def _unmap(self, lines: np.ndarray, indices: np.ndarray) -> None:
        pages = self.page_of[lines, indices]
        held = pages > 0
        lines, indices, pages = lines[held], indices[held], pages[held]
        np.subtract.at(self._users, pages, 1)
        np.subtract.at(self._sum, pages, lines)
        own = pages[self._writer[pages] == lines]
        self._writer[own] = 0
        self.page_of[lines, indices] = 0

    def _first(self, line: int) -> int:
        return self._demand.first_page(int(self._floor[line]))

    def _refuse_lost(self, line: int) -> None:
        page, other = self._lost[line].tolist()
        raise PoolError(
            f"row {self._row(line)} has lost page {self._page(page)} to row {self._row(other)}, which has written it "
            f"since: a page is free after the last step of its row alone; admit row {self._row(line)} again, and "
            "compute its request anew"
        )

    def _row(self, line: int) -> int:
        return self._numbers.rows.outside(int(line))

    def _page(self, page: int) -> int:
        return self._pages.outside(page)


class GroupOwners:
    """Owners of the pages of all page groups. `PagePlaces` are given by group.

    Args:
        groups: of each page group; one without attention layers.
    """

    def __init__(self, groups: Sequence[PageOwners]) -> None:
        self.groups = tuple(groups)

    @property
    def known(self) -> bool:
        return all(group.known for group in self.groups)

    def forget_tables(self) -> None:
        """Tables were written on a device that is not read."""
        for group in self.groups:
            group.known = False

    def forget_rows(self, lines: np.ndarray) -> None:
        for group in self.groups:
            group.forget_rows(lines)

    def checked(
        self, lines: np.ndarray, indices: np.ndarray, pages: np.ndarray, ahead: np.ndarray
    ) -> tuple[PagePlaces, ...]:
        """`PageOwners.checked` of each group. `pages`: [n, G]."""
        return tuple(group.checked(lines, indices, own, ahead) for group, own in zip(self.groups, pages.T))

    def map(self, new: Sequence[PagePlaces]) -> None:
        for group, places in zip(self.groups, new):
            group.map(places)

    def writes(self, lines: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[PagePlaces, ...]:
        return tuple(group.writes(lines, starts, ends) for group in self.groups)

    def check_pages(self, lines: np.ndarray, ends: np.ndarray, writes: Sequence[PagePlaces]) -> None:
        for group, places in zip(self.groups, writes):
            group.check_pages(lines, ends, places)

    def check_seen(self, lines: np.ndarray, starts: np.ndarray) -> None:
        for group in self.groups:
            group.check_seen(lines, starts)

    def take_pages(
        self, lines: np.ndarray, starts: np.ndarray, ends: np.ndarray, writes: Sequence[PagePlaces], rolls_back: int
    ) -> None:
        for group, places in zip(self.groups, writes):
            group.take_pages(lines, starts, ends, places, rolls_back)


def _pairs(lines: np.ndarray, values: np.ndarray) -> np.ndarray:
    return lines.astype(np.int64) << 32 | values
