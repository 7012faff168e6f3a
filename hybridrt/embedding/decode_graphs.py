"""Replays recorded decode steps of an embedded runtime, with the checks of an eager step."""

from collections.abc import Callable

import numpy as np
import torch

from hybridrt.base.errors import BackendError
from hybridrt.base.turns import in_undisturbed
from hybridrt.embedding.batches import Batches
from hybridrt.embedding.numbers import Array, host_integers
from hybridrt.embedding.positions import StepRows
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.step.plan import DecodeRows


class DecodeGraphs:
    """Recorded decode steps of one token a row; `EmbeddedRuntime.capture` makes them.

    CUDA graphs on CUDA. On a CPU a replay calls the same function again, over the same buffers.
    """

    def __init__(
        self,
        graphs: GraphRunner,
        last_tokens: torch.Tensor,
        batches: Batches,
        require_commit: Callable[[str, type[Exception]], None],
    ) -> None:
        self._graphs, self._last_tokens, self._batches = graphs, last_tokens, batches
        self._require_commit = require_commit

    def fits(self, rows: int) -> bool:
        """Whether a graph holds so many rows. Other steps run eagerly."""
        return rows > 0 and self._graphs.bucket(rows) is not None

    @in_undisturbed
    @torch.inference_mode()
    def replay(self, *, input_ids: Array, rows: Array, seq_lens: Array) -> torch.Tensor:
        """Runs and commits a decode step, without prepare, forward or commit.

        Args:
            input_ids, rows, seq_lens: [n], as for `EmbeddedRuntime.batch`; no padding rows.

        Returns:
            [n, vocab] logits in the model's dtype, in memory that the next replay overwrites.

        Raises:
            BackendError, PoolError: the errors of `EmbeddedRuntime.batch`; or no graph holds n
                rows.
        """
        batches = self._batches
        self._require_commit("replay", BackendError)
        lines, lens = batches.numbers.rows.real("rows", rows), host_integers("seq_lens", seq_lens)
        if not self.fits(len(lines)):
            raise BackendError(f"no graph holds {len(lines)} rows: capture such a size, or run the step eagerly")
        ones = np.ones_like(lines)
        batches.check_lengths(lines, lens, ones)
        batches.check_rows(lines)
        batches.owners.check_none_ahead()
        use = batches.use(lines, lens, ones, len(lines))
        given, ids = batches.take_ids(input_ids, len(lines))
        step = None
        if batches.table.mamba_pool is not None:
            step = StepRows(lines.tolist(), (lens - ones).tolist(), lens.tolist(), len(lines))
        batches.positions.check_step(step)
        index, copied = batches.staging.upload((lines, ids))
        self._last_tokens.index_copy_(0, index.long(), copied if given is None else given)
        nothing = np.zeros_like(lines)
        logits = self._graphs.replay(DecodeRows(lines, lens - ones, nothing, nothing))
        batches.positions.prepared(step)
        batches.positions.ran(step)
        batches.owners.prepared(use)
        batches.owners.ran(use)
        return logits
