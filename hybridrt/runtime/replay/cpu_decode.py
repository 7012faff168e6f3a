"""Batches of plain decode steps on a CPU, over tensors that are kept for each number of rows.

Making them anew takes a quarter of a small model's time for a few rows. Here numpy fills the
tensors in place, and the backends prepare the step like a graph's.
"""

from typing import Generic, NamedTuple

import numpy as np
import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.core.packed import A, map_arrays
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step.pack import make_batch
from hybridrt.runtime.step.plan import DecodeRows


class _Columns(NamedTuple, Generic[A]):
    """Integers of n rows: [n] int32, but out_cache_loc [G, n] with G > 1 page groups."""

    input_ids: A
    positions: A
    out_cache_loc: A
    rows: A
    seq_lens: A
    output_indices: A


class _Rows(NamedTuple):
    """`columns` share memory with the other tensors."""

    columns: _Columns[np.ndarray]
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
        self._last_tokens, self._tables = last_tokens.numpy(), req_to_token_pool.tables.numpy()
        self._state_slots, pool = req_to_token_pool.req_to_state_slot.numpy(), req_to_token_pool.mamba_pool
        self._ring_width = 0 if pool is None else max(stack.conv.shape[-1] for _, stack in pool.stacks)
        self._view = backend.init_cuda_graph_state(req_to_token_pool.num_rows, req_to_token_pool.num_rows)
        self._made: dict[int, _Rows] = {}

    def prepare(self, decode: DecodeRows) -> tuple[ForwardBatch, torch.Tensor]:
        """The prepared batch of a step without drafts, and its output indices [n] int32. The next
        step of as many rows overwrites both. The tables must contain the pages of all tokens."""
        n = len(decode.rows)
        step = self._made.get(n) or self._make(n)
        columns, rows, computed = step.columns, decode.rows, decode.computed
        columns.positions[:], columns.rows[:], columns.output_indices[:] = computed, rows, decode.output_indices
        np.maximum(self._last_tokens[rows], 0, out=columns.input_ids)  # -1: the logits were not finite
        np.add(computed, 1, out=columns.seq_lens)
        if self._tables.shape[2]:
            columns.out_cache_loc[:] = self._tables[rows, :, computed].T
        step.batch.seq_lens_cpu = columns.seq_lens.tolist()
        self._backend.prepare(step.batch, graph=self._view)
        return step.batch, step.output_indices

    def recorded_slot(self, decode: DecodeRows) -> int | None:
        """The state slot of a step's only row, once its conv rings are full; else None. Steps of
        the same slot do the same to the same tensors, except for softmax attention."""
        if len(decode.rows) != 1 or decode.computed[0] < self._ring_width:
            return None
        return int(self._state_slots[decode.rows[0]])

    def _make(self, n: int) -> _Rows:
        columns, groups = torch.zeros(len(_Columns._fields) - 1, n, dtype=torch.int32), self._tables.shape[1]
        places = torch.zeros(*(groups,) * (groups > 1), n, dtype=torch.int32)
        made = _Columns(columns[0], columns[1], places, columns[2], columns[3], columns[4])
        starts = torch.arange(n + 1, dtype=torch.int32)
        inputs = TokenInputs(made.input_ids, made.positions, made.out_cache_loc)
        batch = make_batch(self._backend, made.rows, made.seq_lens, starts, inputs, n, None)
        self._made[n] = _Rows(map_arrays(torch.Tensor.numpy, made), batch, made.output_indices)
        return self._made[n]
