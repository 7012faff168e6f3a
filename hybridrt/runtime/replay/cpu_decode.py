"""Plain decode steps on a CPU, over tensors and batches that are made once per number of rows.

An eager step makes tensors and a batch, and its backends look at all numbers: for a few rows of a
small model that takes a quarter of the model's time. Here numpy fills the tensors in place, and the
backends prepare the step like a graph's, with the numbers of the scheduler and the tables.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step.batch import make_batch
from hybridrt.runtime.step.plan import DecodeRows


class _Rows(NamedTuple):
    """A step of n rows.

    Attributes:
        columns: [6, n] int32: input_ids, positions, out_cache_loc, rows, seq_lens, output_indices.
            The tensors of `batch` are views of it.
        output_indices: [n] int32.
    """

    columns: np.ndarray
    batch: ForwardBatch
    output_indices: torch.Tensor


class CPUDecode:
    """Prepares plain decode steps.

    Args:
        last_tokens: [R + 1] int32, the next input of every request row.
    """

    def __init__(
        self, backend: AttentionBackend, req_to_token_pool: HybridReqToTokenPool, last_tokens: torch.Tensor
    ) -> None:
        self._backend = backend
        self._last_tokens, self._table = last_tokens.numpy(), req_to_token_pool.req_to_token.numpy()
        self._view = backend.init_cuda_graph_state(req_to_token_pool.num_rows, req_to_token_pool.num_rows)
        self._made: dict[int, _Rows] = {}

    def prepare(self, decode: DecodeRows) -> tuple[ForwardBatch, torch.Tensor]:
        """The prepared batch of a step without drafts, and its output indices [n] int32. The next
        step of as many rows overwrites both. The tables must contain the pages of all tokens."""
        columns, batch, output_indices = self._made.get(len(decode)) or self._make(len(decode))
        rows, computed = decode.rows, decode.computed
        ids, _, slots, _, lens, _ = columns
        columns[1], columns[3], columns[5] = computed, rows, decode.output_indices
        np.maximum(self._last_tokens[rows], 0, out=ids)  # -1: the logits were not finite
        np.add(computed, 1, out=lens)
        if self._table.shape[1]:
            slots[:] = self._table[rows, computed]
        batch.seq_lens_cpu = lens.tolist()
        self._backend.prepare(batch, graph=self._view)
        return batch, output_indices

    def key(self, batch: ForwardBatch) -> Hashable:
        """Steps of equal keys are the same operations on the same tensors; None: this one is
        unique."""
        key = self._backend.recording_key(batch)
        return None if key is None else (batch.batch_size, key)

    def _make(self, n: int) -> _Rows:
        columns = torch.zeros(6, n, dtype=torch.int32)
        starts = torch.arange(n + 1, dtype=torch.int32)
        *inputs, rows, seq_lens, output_indices = columns
        batch = make_batch(self._backend, rows, seq_lens, starts, TokenInputs(*inputs), n, None)
        self._made[n] = _Rows(columns.numpy(), batch, output_indices)
        return self._made[n]
