"""What a block adds to the residual: its sum over the ranks may be left to the next norm, or still run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridrt.collectives.groups import PendingSum, TPGroup

if TYPE_CHECKING:
    from hybridrt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Unsummed:
    """This rank's summand [T, hidden] of what a block adds. The next norm sums it over the ranks, in one
    launch with the addition and the norm."""

    summand: torch.Tensor
    tp: TPGroup

    def normed(self, norm: "RMSNorm", residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `norm` of the sum."""
        if residual is None or residual.dtype != self.summand.dtype:
            return norm(summed(self), residual)
        return self.tp.sum_add_rms_norm(self.summand, residual, norm.weight, norm.eps)

    def __len__(self) -> int:
        return len(self.summand)


@dataclass(frozen=True, slots=True)
class Arriving:
    """What a block adds [T, hidden], in pieces of rows. The ranks sum one while they compute with
    another one: norms and products need no whole sequences."""

    sums: Sequence[PendingSum]

    def with_rows(self, residual: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each piece, once it is summed, and its rows of the residual [T, hidden]."""
        first = 0
        for each in self.sums:
            piece = each.result()
            end = first + len(piece)
            yield piece, None if residual is None else residual[first:end]
            first = end

    def __len__(self) -> int:
        return sum(len(each.x) for each in self.sums)

    @property
    def dtype(self) -> torch.dtype:
        return self.sums[0].x.dtype

    def new_empty(self, width: int) -> torch.Tensor:
        """[T, width]."""
        return self.sums[0].x.new_empty(len(self), width)

    def whole(self) -> torch.Tensor:
        """[T, hidden]."""
        return stacked([each.result() for each in self.sums])

    def normed(self, norm: "RMSNorm", residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `norm` of the sum."""
        return norm(self.whole(), residual)


Hidden = torch.Tensor | Unsummed | Arriving
# What a block adds, and the residual [T, hidden]; None: already added.
Summands = tuple[Hidden, torch.Tensor | None]


def summed(x: Hidden) -> torch.Tensor:
    """[T, hidden], the sum over the ranks."""
    if isinstance(x, Arriving):
        return x.whole()
    return x.tp.all_reduce(x.summand) if isinstance(x, Unsummed) else x


def summed_later(x: torch.Tensor, tp: TPGroup) -> Hidden:
    """The sum of x [T, hidden] over the ranks, left to the next norm where that is faster."""
    return Unsummed(x, tp) if tp.sums_with_norm(x) else tp.all_reduce(x)


def arriving(summands: Iterable[tuple[torch.Tensor, torch.Tensor | None]], tp: TPGroup) -> Summands:
    """Sums over the ranks of summands of successive rows, each started before the next summand is
    computed, and the residuals [T, hidden] to add them to; None: already added."""
    sums, rests = list[PendingSum](), list[torch.Tensor]()
    for summand, rest in summands:
        sums.append(tp.start_sum(summand))
        rests += () if rest is None else (rest,)
    return Arriving(sums), stacked(rests) if rests else None


def in_halves(
    residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """The first half of the rows of each, then the second."""
    for rows in (slice(len(x) // 2), slice(len(x) // 2, None)):
        yield residual[rows], x[rows], None if tail is None else tail[rows]


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts [t, D] as one [T, D]: a view of neighbouring rows, else a copy."""
    first = parts[0]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    rows_touch = all(part.is_contiguous() and part.data_ptr() == end for part, end in zip(parts[1:], ends))
    if first.is_contiguous() and len(storages) == 1 and rows_touch:
        return first.as_strided((sum(map(len, parts)), first.shape[1]), first.stride())
    return torch.cat(list(parts))
