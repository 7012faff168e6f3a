"""Plain decode steps on a CPU: over kept tensors, and of one row recorded and repeated.

Tensors and batches are made once for each number of rows: making them anew takes a quarter of a
small model's time for a few rows. numpy fills them in place, and the backends prepare the step like
a graph's.

Steps of one row are recorded, and repeated from then on. A step of the built-in model on one core
takes 4.56 ms instead of 5.64 ms (cuda_graph=False). Steps of more rows gained less than 5%, so they
are not recorded. torch.compile splits the step at each look at a number on the host, and takes
longer than eager steps.

This file alone decides what varies between steps. Softmax attention, whose context grows, is called
again. A step is not recorded if it reads numbers on the host elsewhere (experts), or has a part
from another package, which may call libraries that PyTorch does not see.
"""

import logging
import os
from functools import partial
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from hybridrt.attention.base import AttentionBackend, AttentionInputs
from hybridrt.base.forward_batch import AttentionBackendLike, ForwardBatch, RoutedLayer
from hybridrt.kernels.core.packed import A, map_arrays
from hybridrt.kernels.core.providers import ENVIRONMENT_VARIABLE
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.models.base import CausalLM
from hybridrt.runtime.replay.recording import Recording, missing
from hybridrt.runtime.step.pack import make_batch
from hybridrt.runtime.step.plan import DecodeRows

logger = logging.getLogger(__name__)

RECORDS_AFTER = 8  # steps of one state slot, one after the other: recording takes as long as ten
MOST_BYTES = 64 << 20  # bytes of the tensors that recordings keep, outside of the memory plan
MOST_KEPT = 256  # recordings
KNOWN = ("hybridrt", "torch")  # packages whose parts are known to call operations of PyTorch alone


class _Columns(NamedTuple, Generic[A]):
    """The numbers of n rows, [n] int32 each; out_cache_loc is [G, n] with G > 1 page groups, and
    mrope_positions None in models without positions on three axes."""

    input_ids: A
    positions: A
    out_cache_loc: A
    rows: A
    seq_lens: A
    output_indices: A
    mrope_positions: A | None


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
        deltas = req_to_token_pool.mrope_deltas
        self._mrope_deltas = None if deltas is None else deltas.numpy()
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
        if columns.mrope_positions is not None and self._mrope_deltas is not None:
            np.add(computed, self._mrope_deltas[rows], out=columns.mrope_positions)
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
        mrope = None if self._mrope_deltas is None else columns[5]
        places = torch.zeros(*(groups,) * (groups > 1), n, dtype=torch.int32)
        made = _Columns(columns[0], columns[1], places, columns[2], columns[3], columns[4], mrope)
        starts = torch.arange(n + 1, dtype=torch.int32)
        inputs = TokenInputs(made.input_ids, made.positions, made.out_cache_loc, mrope)
        batch = make_batch(self._backend, made.rows, made.seq_lens, starts, inputs, n, None)
        self._made[n] = _Rows(map_arrays(torch.Tensor.numpy, made), batch, made.output_indices)
        return self._made[n]


class Recordings:
    """Records steps that come again and again, and repeats them.

    While modules of the model have hooks, steps are neither recorded nor repeated: the hooks are
    called.

    Args:
        model: computes the steps.
        on: False records nothing.

    Attributes:
        problems: why steps cannot be repeated, each reason once; they run without a recording.
    """

    def __init__(self, model: CausalLM, on: bool) -> None:
        self._model = model
        self.problems: set[str] = set()
        if on and (problem := missing() or _unknown_part(model)) is not None:
            self._tell(problem)
        self._on = on and not self.problems
        self._kept: dict[int, tuple[Recording, Tensor] | None] = {}  # None: it cannot be repeated
        self._last: int | None = None
        self._times = 0
        own = [hooks for m in model.modules() for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks = [*own, modules._global_forward_pre_hooks, modules._global_forward_hooks]

    def run(self, state_slot: int | None, batch: ForwardBatch) -> Tensor:
        """Logits of a prepared step, by the model or by a repetition. Steps of the same
        `state_slot`, except None, are the same operations on the same tensors, except for softmax
        attention."""
        kept = self._kept.get(state_slot) if state_slot is not None else None
        if kept is not None and not any(self._hooks):
            recording, result = kept
            recording.repeat()
            return result
        if state_slot is None or not self._is_time(state_slot):
            return self._model.logits(self._model(batch))
        return self._record(state_slot, batch)

    def _is_time(self, state_slot: int) -> bool:
        if not self._on or state_slot in self._kept or any(self._hooks):
            return False
        self._times = self._times + 1 if state_slot == self._last else 1
        self._last = state_slot
        return self._times >= RECORDS_AFTER

    def _record(self, state_slot: int, batch: ForwardBatch) -> Tensor:
        recording, backend = Recording(MOST_BYTES), batch.attn_backend
        batch.attn_backend = _AttentionAgain(backend, recording)
        try:
            with recording:
                result = self._model.logits(self._model(batch))
        finally:
            batch.attn_backend = backend
        problem = recording.problem
        self._make_room(recording.bytes if problem is None else 0)
        if problem is not None:
            self._tell(problem)
        self._kept[state_slot] = (recording, result) if problem is None else None
        return result

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            logger.info("decode steps run without a recording: %s", problem)
            self.problems.add(problem)

    def _make_room(self, needed: int) -> None:
        sizes = {state_slot: kept[0].bytes if kept else 0 for state_slot, kept in self._kept.items()}
        taken = sum(sizes.values()) + needed
        for state_slot, size in sizes.items():
            if taken <= MOST_BYTES and len(self._kept) < MOST_KEPT:
                return
            del self._kept[state_slot]
            taken -= size


class _AttentionAgain:
    """The backend of a recorded step: repetitions call softmax attention again."""

    def __init__(self, backend: AttentionBackendLike, recording: Recording) -> None:
        self._backend, self._recording = backend, recording

    @property
    def linear_attn_backend(self) -> Any:
        return self._backend.linear_attn_backend

    def route(self, layer: RoutedLayer) -> AttentionBackend:
        found: AttentionBackend = self._backend.route(layer)
        return found

    def run(self, layer: Any, batch: ForwardBatch, inputs: Any, out: Tensor | None = None) -> Tensor:
        call = partial(self._backend.run, layer, batch, inputs, out)
        return self._recording.call_again(call) if isinstance(inputs, AttentionInputs) else call()


def _unknown_part(model: nn.Module) -> str | None:
    """Why the steps of a model are not recorded; None if they are."""
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return f"{ENVIRONMENT_VARIABLE} may choose kernels that are no operations of PyTorch"
    for part in model.modules():
        for each in (part, getattr(part, "method", None) or part):
            if type(each).__module__.partition(".")[0] not in KNOWN:
                return f"{type(each).__qualname__} is not part of hybridrt"
            if type(each).__module__.startswith("hybridrt.layers.quant."):
                return "a recording would keep what quantised weights are decoded to"
    return None
