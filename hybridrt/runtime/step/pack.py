"""Packs a StepPlan into one host buffer, moved to the device in one copy, and cuts it into named views there.

Eager steps and graphs share the columns of `pack_rows`. A graph's buffers hold nothing else, and its rows are padded to
their size. An eager step adds its chunks and the host's bookkeeping.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np
import torch

from hybridrt.base.device import PAST, Event, pinned_empty, record_event
from hybridrt.kernels.core.chunk_plan import CHUNK_COLUMNS, ChunkPlan, chunk_columns, chunk_plan
from hybridrt.runtime.step.plan import NO_INTEGERS, DecodeRows, ExtendRow, StepPlan, int32s
from hybridrt.runtime.step.sampling_table import SamplingTable

# Each section starts on 16 bytes: Triton compiles a kernel anew for every combination of aligned and unaligned
# arguments.
_ALIGNED = 4
_GAPS = [np.zeros(size, np.int32) for size in range(_ALIGNED)]  # behind columns
Columns = dict[str, np.ndarray]
Sections = dict[str, torch.Tensor]


def pack_batch(
    plan: StepPlan, tokens: int, tree: bool = False, following: bool = False, chunk_sizes: Sequence[int] = ()
) -> Columns:
    """What a step computes, as int32 sections: `pack_rows`, and

    query_start_loc [B + 1]; sample_at and sample_rows, the tokens to sample from and their rows; of the extend rows'
    tokens input_ids, extend_rows, extend_positions and, with `following`, following_ids behind each (0 where it is
    sampled); where a chunk follows a cached prefix, read_state_slots of all chunks; chunk plans.

    Args:
        tree: drafts are trees: `parents` and `ancestors` are packed.
        following: the token behind each prompt token is packed too, for a prediction head.
        chunk_sizes: of the recurrent layers' prefill (`ChunkPlan`).
    """
    extend, decoded = plan.extend, len(plan.decode) * tokens
    read_state_slots = int32s(r.read_state_slot for r in extend)
    new = int32s(len(r.tokens) for r in extend)
    computed = int32s(r.computed for r in extend)
    ends = decoded + np.cumsum(new, dtype=np.int32)
    sampling = np.fromiter((r.sample for r in extend), bool)
    rows = pack_rows(plan.decode, extend, tokens, tree, np.full(len(plan.decode), -1, np.int32))
    extend_rows = rows["rows"][len(plan.decode) :]
    starts = np.repeat(computed + new - ends, new)  # a token's position less its place in the batch
    return {
        **rows,
        "query_start_loc": np.concatenate((np.arange(0, decoded + 1, tokens, dtype=np.int32), ends)),
        "sample_at": np.concatenate((np.arange(decoded, dtype=np.int32), ends[sampling] - 1)),
        "sample_rows": np.concatenate((plan.decode.rows, extend_rows[sampling])),
        "input_ids": _flat([r.tokens for r in extend]),
        "extend_rows": np.repeat(extend_rows, new),
        "extend_positions": np.arange(decoded, decoded + new.sum(), dtype=np.int32) + starts,
        **({"following_ids": _flat([[*r.tokens[1:], r.following] for r in extend])} if following else {}),
        **({"read_state_slots": read_state_slots} if read_state_slots.any() else {}),
        **pack_chunks(computed.tolist(), new.tolist(), chunk_sizes),
    }


def pack_rows(
    decode: DecodeRows, extend: Sequence[ExtendRow], tokens: int, tree: bool, new_pages: np.ndarray
) -> Columns:
    """The columns of a step's rows, decode rows of T `tokens` first.

    rows and seq_lens [B], which count the step's tokens; output_indices of those that sample; of the decode rows alone
    `new_pages` [n], the KV page of the last draft if the step's graph enters it, else -1. Where T > 1 also num_drafts,
    drafts [n, T - 1] and, with `tree`, parents and ancestors [n, T] of all nodes (`tree_nodes`).
    """
    n = len(decode)
    rows, lens, indices = decode.rows, decode.computed + tokens, decode.output_indices
    if extend:
        rows = np.concatenate((rows, int32s(r.row for r in extend)))
        lens = np.concatenate((lens, int32s(r.computed + len(r.tokens) for r in extend)))
        indices = np.concatenate((indices, int32s(r.output_index for r in extend if r.sample)))
    columns = {"rows": rows, "seq_lens": lens, "output_indices": indices, "new_pages": new_pages}
    if tokens > 1:
        columns["num_drafts"] = decode.num_drafts
        columns["drafts"] = drafts = np.zeros((n, tokens - 1), np.int32)
        drafts[np.arange(tokens - 1) < decode.num_drafts[:, None]] = decode.drafts
        columns |= tree_nodes(decode, tokens) if tree else {}
    return columns


def tree_nodes(decode: DecodeRows, width: int) -> Columns:
    """`parents` (-1 for the root) and `ancestors` (as bits, the node's own among them) of the `width` nodes of each
    row, [n, width] int32 each. Chains are trees too; padding continues a row as a chain."""
    n = len(decode)
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (n, 1))
    if decode.parents is not None:
        real = np.arange(width - 1) < decode.num_drafts[:, None]
        parents[:, 1:][real] = decode.parents
    ancestors = np.ones((n, width), np.int32)
    for node in range(1, width):
        ancestors[:, node] = ancestors[np.arange(n), parents[:, node]] | 1 << node
    return {"parents": parents, "ancestors": ancestors}


def chunk_names(size: int) -> dict[str, str]:
    """The tensors of a ChunkPlan of a chunk size, and the names that they are packed under."""
    return {name: f"{name} of {size}" for name in CHUNK_COLUMNS}


def pack_chunks(computed: Sequence[int], new: Sequence[int], sizes: Iterable[int]) -> Columns:
    """The tensors of the chunk plans of each of `sizes`, for rows with `computed` tokens and `new` ones."""
    plans = {size: chunk_columns(computed, new, size) for size in sizes}
    return {packed: plans[size][name] for size in plans for name, packed in chunk_names(size).items()}


def chunk_plans(columns: Columns, sections: Sections, new: Sequence[int], sizes: Iterable[int]) -> dict[int, ChunkPlan]:
    """By chunk size, the plans that `pack_chunks` packed into `columns`, which are on the device as `sections`."""
    plans = {}
    for size in sizes:
        names = chunk_names(size)
        on_host = {name: columns[packed] for name, packed in names.items()}
        plans[size] = chunk_plan({name: sections[packed] for name, packed in names.items()}, on_host, new, size)
    return plans


def pack_bookkeeping(plan: StepPlan) -> Columns:
    """What changes in the tables before a step computes, as int32 sections (floats and int64 as their bits): the
    constants of admitted requests; admit_rows, admit_state_slots and admit_phases; page-table entries (page_rows,
    page_indices, pages); copies of pages (copy_sources, copy_targets)."""
    return {
        **SamplingTable.pack(plan.admissions),
        "admit_rows": int32s(a.row for a in plan.admissions),
        "admit_state_slots": int32s(a.state_slot for a in plan.admissions),
        "admit_phases": int32s(a.phase for a in plan.admissions),
        "page_rows": _flat([np.full(len(w.pages), w.row, np.int32) for w in plan.page_writes]),
        "page_indices": _flat([np.arange(w.first_page, w.first_page + len(w.pages)) for w in plan.page_writes]),
        "pages": _flat([w.pages for w in plan.page_writes]),
        "copy_sources": int32s(copy.source for copy in plan.page_copies),
        "copy_targets": int32s(copy.target for copy in plan.page_copies),
    }


def _flat(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(p, np.int32) for p in parts]) if parts else NO_INTEGERS


def cut(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Sections:
    """Views of `flat` [packed_size] int32, one behind the other."""
    sizes = [prod(shape) for shape in shapes.values()]
    parts = flat.split([length for size in sizes for length in (size, -size % _ALIGNED)])[::2]
    return {name: part if len(shape) == 1 else part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


def packed_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Integers of a buffer that `cut` cuts."""
    return sum(_aligned(prod(shape)) for shape in shapes.values())


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED


class StagingRing:
    """Host-to-device copies that the host never waits for: pinned staging, a ring of three buffers, each reused after
    its copy's event. On a CPU the host buffer itself serves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: list[torch.Tensor | None] = [None] * 3
        self._views: list[tuple[torch.Tensor, np.ndarray] | None] = [None] * 3  # of the last size, of each
        self._events: list[Event] = [PAST] * 3
        self._next = 0

    def upload(self, columns: Columns) -> Sections:
        """One copy for all columns, into fresh device memory."""
        shapes = {name: column.shape for name, column in columns.items()}
        into = torch.empty(packed_size(shapes), dtype=torch.int32, device=self.device)
        self.copy(into, columns)
        return cut(into, shapes)

    def copy(self, into: torch.Tensor, columns: Columns) -> None:
        """One copy of all columns into [packed_size] int32."""
        (staging, flat), parts = self._staging(into), list[np.ndarray]()
        for column in columns.values():
            parts += column.reshape(-1), _GAPS[-column.size % _ALIGNED]
        np.concatenate(parts, out=flat)
        self._copy(into, staging)

    def copy_packed(self, into: torch.Tensor, packed: np.ndarray) -> None:
        """One copy of [packed_size] int32, which may change as soon as this returns."""
        staging, flat = self._staging(into)
        flat[:] = packed
        self._copy(into, staging)

    def copy_rows(self, into: torch.Tensor, columns: Columns, padding: Columns, size: int) -> None:
        """One copy of all columns into [packed_size] int32, each continued to `size` rows with its row of `padding`. A
        column may be shorter than the others, or empty."""
        (staging, flat), start = self._staging(into), 0
        for name, column in columns.items():
            fill, n = padding[name], len(column)
            count = fill.size * size
            section = flat[start : start + count]
            if column.ndim > 1:
                section = section.reshape(size, -1)
            section[:n] = column
            if n < size:
                section[n:] = fill
            start += _aligned(count)
        self._copy(into, staging)

    def _staging(self, into: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Pinned memory for a copy to `into`, as a tensor and as an array; on a CPU `into` itself."""
        if self.device.type == "cpu":
            return into, into.numpy()
        i, size = self._next, into.numel()
        event, pinned, views = self._events[i], self._pinned[i], self._views[i]
        event.synchronize()  # three copies back: done long ago unless the host runs far ahead
        if views is None or len(views[1]) != size:  # most copies of a ring have one size
            if pinned is None or pinned.numel() < size:
                pinned = self._pinned[i] = pinned_empty(max(size, 4096) * 2, torch.int32)
            views = self._views[i] = pinned[:size], pinned[:size].numpy()
        return views

    def _copy(self, into: torch.Tensor, staging: torch.Tensor) -> None:
        if self.device.type == "cpu":
            return
        into.copy_(staging, non_blocking=True)
        i = self._next
        self._events[i] = record_event(self.device, self._events[i])
        self._next = (i + 1) % len(self._pinned)
