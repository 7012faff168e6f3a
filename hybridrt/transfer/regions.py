"""Who owns which bytes of an arena: host integers, first fit."""

from hybridrt.errors import OutOfSlotsError, PoolError


class RegionAllocator:
    """Hands out runs of [0, total) bytes; free + used == total always holds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [(0, total)] if total else []  # (start, end), in order, never touching
        self._used: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Bytes."""
        return sum(end - start for start, end in self._free)

    @property
    def num_used(self) -> int:
        """Bytes."""
        return sum(self._used.values())

    def alloc(self, nbytes: int) -> int:
        """Offset of `nbytes` > 0 bytes.

        Raises:
            OutOfSlotsError: no free run is long enough; nothing was taken.
        """
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                self._used[start] = nbytes
                return start
        raise OutOfSlotsError(f"{nbytes} bytes of the transfer arena wanted, {self.num_free} of {self.total} free")

    def free(self, offset: int) -> None:
        """Gives back what `alloc` returned.

        Raises:
            PoolError: it is not in use.
        """
        if offset not in self._used:
            raise PoolError(f"no region of the transfer arena that is in use starts at byte {offset}")
        runs = sorted([*self._free, (offset, offset + self._used.pop(offset))])
        self._free = []
        for start, end in runs:
            if self._free and self._free[-1][1] == start:
                self._free[-1] = (self._free[-1][0], end)
            else:
                self._free.append((start, end))

    def check(self) -> None:
        """Raises PoolError unless free and used runs fill [0, total) without overlap."""
        runs = sorted([*self._free, *((start, start + nbytes) for start, nbytes in self._used.items())])
        ends = [0, *(end for _, end in runs)]
        if [start for start, _ in runs] != ends[:-1] or ends[-1] != self.total:
            raise PoolError(f"free runs {self._free} and used {self._used} do not fill {self.total} bytes")
