"""Counts on the host how many state rings each step folds; the device decides by the same numbers."""

from collections.abc import Sequence

import numpy as np

from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.runtime.step.plan import StepPlan


class FoldCounts:
    """Follows the ring cursors of running requests through steps that have been read.

    Args:
        num_rows: request rows.
        width: columns of a ring.
        widest: tokens of a row in the widest step.

    Attributes:
        last: a ring that ends after this column is folded.
    """

    def __init__(self, num_rows: int, width: int, widest: int) -> None:
        self._ends = np.zeros(num_rows + 1, np.int32)  # the column after the last entry of each row
        self.last, self._phases = width - widest, width - widest + 1

    @classmethod
    def from_pool(cls, pool: MambaPool | None) -> "FoldCounts | None":
        if pool is None or pool.spec.mode != "replay":
            return None
        return cls(pool.num_rows, pool.width, pool.spec.tokens_per_step)

    def of_step(self, plan: StepPlan, gained: Sequence[int]) -> int:
        """Rings that a step has folded. Call it for every step that has run, in order. `gained`:
        tokens that each decode row gained.
        """
        for admission in plan.admissions:
            self._ends[admission.row] = admission.phase % self._phases
        if not len(plan.decode):
            return 0
        rows = plan.decode.rows.astype(np.int64)  # the fastest index
        ends = self._ends[rows] + np.fromiter(gained, np.int32)
        full = ends > self.last
        ends[full] = 0
        self._ends[rows] = ends
        return int(np.count_nonzero(full))

    def end_of(self, row: int) -> int:
        """The column after the last entry of a row's ring."""
        return int(self._ends[row])
