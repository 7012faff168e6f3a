"""What a block adds to the residual, whose sum over the ranks may be left to the next norm."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hybridrt.collectives.groups import TPGroup

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


Hidden = torch.Tensor | Unsummed
# What a block adds, and the residual [T, hidden]; None: already added.
Summands = tuple[Hidden, torch.Tensor | None]


def summed(x: Hidden) -> torch.Tensor:
    """[T, hidden], the sum over the ranks."""
    return x.tp.all_reduce(x.summand) if isinstance(x, Unsummed) else x


def summed_later(x: torch.Tensor, tp: TPGroup) -> Hidden:
    """The sum of x [T, hidden] over the ranks, left to the next norm where that is faster."""
    return Unsummed(x, tp) if tp.sums_with_norm(x) else tp.all_reduce(x)
