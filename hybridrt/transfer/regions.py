"""Allocates byte ranges of an arena: host integers, first fit."""

from hybridrt.base.errors import OutOfSlotsError, PoolError


class RegionAllocator:
    """Hands out runs of [0, total) bytes that do not overlap."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._used: dict[int, int] = {}  # by offset, how many bytes

    @property
    def num_used(self) -> int:
        return sum(self._used.values())

    def alloc(self, nbytes: int) -> int:
        """Offset of `nbytes` > 0 bytes.

        Raises:
            OutOfSlotsError: no free run is long enough; nothing was taken.
        """
        start = 0
        for offset in sorted(self._used):
            if offset - start >= nbytes:
                break
            start = offset + self._used[offset]
        if start + nbytes > self.total:
            free = self.total - self.num_used
            raise OutOfSlotsError(f"{nbytes} bytes of the transfer arena wanted, {free} of {self.total} free")
        self._used[start] = nbytes
        return start

    def free(self, offset: int) -> None:
        """Gives back what `alloc` returned.

        Raises:
            PoolError: it is not in use.
        """
        if offset not in self._used:
            raise PoolError(f"no region of the transfer arena that is in use starts at byte {offset}")
        del self._used[offset]
