"""Packs a StepPlan into one record of int32 arrays, copies it to the device, and makes a batch of it.

The type is the same on host and device, for eager steps and graphs, which pad.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.device import PAST, DeviceEvent, pinned_empty, record_event
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.core.packed import (
    A,
    Record,
    arrays_of,
    int32_array,
    map_arrays,
    pack_arrays,
    packed_size,
    unpack,
)
from hybridrt.kernels.core.records import DecodeRowInputs, TokenInputs
from hybridrt.kernels.state.decode_inputs import decode_inputs
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step.plan import DecodeRows, ExtendRow, PageWrite, StepPlan
from hybridrt.runtime.step.recurrent_arrays import RecurrentArrays, recurrent_lists
from hybridrt.runtime.step.sampling_table import SamplingArrays, SamplingTable


class AdmissionArrays(NamedTuple, Generic[A]):
    """Admissions as columns, [n] each: fields of `Admission`, and its sampling constants."""

    rows: A
    state_slots: A
    phases: A
    sampling: SamplingArrays[A]


class PageEntries(NamedTuple, Generic[A]):
    """Entries of page tables: page `indices[i]` of request row `rows[i]` is `pages[i]`, one in each
    page group. [n], [n] and [n, G]."""

    rows: A
    indices: A
    pages: A


class PageCopies(NamedTuple, Generic[A]):
    """KV of pages `sources` [n, G] is copied to pages `targets` [n, G], in each page group."""

    sources: A
    targets: A


class TableChanges(NamedTuple, Generic[A]):
    """Table changes before a step computes; None where there are none."""

    admissions: AdmissionArrays[A] | None
    pages: PageEntries[A] | None
    copies: PageCopies[A] | None


class DraftArrays(NamedTuple, Generic[A]):
    """The drafts of n decode rows of T > 1 tokens.

    Attributes:
        counts: [n], drafts of each row; tokens: [n, T - 1].
        predecessors: [n, T] of `SpecInfo`; None for chains.
        ancestors: [n, T], bit i is set where an input follows input i, directly or not, or is it;
            None for chains.
    """

    counts: A
    tokens: A
    predecessors: A | None = None
    ancestors: A | None = None


class EmbeddedTokens(NamedTuple, Generic[A]):
    """Tokens [n] of a step by their places in the batch, and rows [n] of the embedding cache."""

    places: A
    rows: A


class PromptArrays(NamedTuple, Generic[A]):
    """Further arrays of a step with extend rows.

    Attributes:
        query_start_loc: [B + 1] of all rows of the step.
        sample_at, sample_rows: the tokens to sample from and their request rows, those of decode
            rows first.
        input_ids, rows, positions: [t], of the extend rows' tokens.
        following_ids: [t], the token after each of them, 0 where it is sampled; None: no prediction
            head needs them.
        embedded: tokens with embeddings of an encoder; None: there are none.
        mrope: [3, t], positions of these tokens on three axes; None: three times `positions`. In a
            padded step [t], three times the same.
    """

    query_start_loc: A
    sample_at: A
    sample_rows: A
    input_ids: A
    rows: A
    positions: A
    following_ids: A | None
    recurrent: RecurrentArrays[A]
    embedded: EmbeddedTokens[A] | None = None
    mrope: A | None = None


class ScoredTokens(NamedTuple, Generic[A]):
    """Prompt tokens [n] that get log-probabilities, and their places in the batch [n]."""

    places: A
    tokens: A


class StepArrays(NamedTuple, Generic[A]):
    """The arrays of a step.

    Attributes:
        rows, seq_lens: [B] request rows, decode rows first, and their lengths, the step's tokens
            included.
        output_indices: index of the next output token of the rows that sample.
        new_pages: [n, G], for each decode row the KV pages of its last draft if the graph enters
            them, else -1.
        drafts: None where decode rows have one token; prompts: None without extend rows.
    """

    rows: A
    seq_lens: A
    output_indices: A
    new_pages: A
    drafts: DraftArrays[A] | None = None
    prompts: PromptArrays[A] | None = None
    tables: TableChanges[A] | None = None
    scored: ScoredTokens[A] | None = None

    @property
    def sample_rows(self) -> A:
        """Request rows of the lines of `output_indices`."""
        return self.rows if self.prompts is None else self.prompts.sample_rows


def pack_step(
    plan: StepPlan,
    tokens_per_row: int,
    *,
    groups: int = 1,
    forks: bool = False,
    spans: bool = False,
    following: bool = False,
    chunk_sizes: Sequence[int] = (),
    at_chunks: bool = False,
    scored: ScoredTokens[np.ndarray] | None = None,
) -> StepArrays[np.ndarray]:
    """An eager step with decode rows of T `tokens_per_row`.

    Args:
        groups: page groups.
        forks: drafts may be trees.
        spans: prompts may have tokens with embeddings of an encoder.
        following: also pack the token after each prompt token, for a prediction head.
        chunk_sizes, at_chunks: arguments of `recurrent_lists`.
        scored: tokens of prompts whose log-probabilities are wanted.
    """
    none = np.full((len(plan.decode.rows), groups), -1, np.int32)
    step, tables = pack_rows(plan.decode, tokens_per_row, forks, none), pack_tables(plan)
    if not plan.extend:
        return StepArrays(step.rows, step.seq_lens, step.output_indices, none, step.drafts, None, tables, scored)
    # Entries of the extend rows. One array is faster than several short ones.
    row, computed, new, indices, sample = int32_array(
        [(r.row, r.computed, len(r.tokens), r.output_index, r.sample) for r in plan.extend]
    ).T
    sampling, decoded = sample.nonzero()[0], len(none) * tokens_per_row
    ends = decoded + np.cumsum(new, dtype=np.int32)
    starts = np.repeat(computed + new - ends, new)
    following_ids = _flat([[*r.tokens[1:], r.following] for r in plan.extend]) if following else None
    prompts = PromptArrays(
        np.concatenate((np.arange(0, decoded + 1, tokens_per_row, dtype=np.int32), ends)),
        np.concatenate((np.arange(decoded, dtype=np.int32), ends[sampling] - 1)),
        np.concatenate((plan.decode.rows, row[sampling])),
        _flat([r.tokens for r in plan.extend]),
        np.repeat(row, new),
        np.arange(decoded, decoded + len(starts), dtype=np.int32) + starts,
        following_ids,
        map_arrays(int32_array, recurrent_lists(plan.extend, chunk_sizes, at_chunks)),
        _pack_embedded(plan.extend, decoded) if spans else None,
        _pack_mrope(plan.extend) if spans else None,
    )
    return StepArrays(
        np.concatenate((step.rows, row)),
        np.concatenate((step.seq_lens, computed + new)),
        np.concatenate((step.output_indices, indices[sampling])),
        none,
        step.drafts,
        prompts,
        tables,
        scored,
    )


def _pack_embedded(extend: Sequence[ExtendRow], decoded: int) -> EmbeddedTokens[np.ndarray] | None:
    """`decoded`: tokens of decode rows, which come first."""
    places, rows, start = list[np.ndarray](), list[np.ndarray](), decoded
    for row in extend:
        if row.embeddings is not None:
            places.append(row.embeddings.places + np.int32(start))
            rows.append(row.embeddings.rows)
        start += len(row.tokens)
    return EmbeddedTokens(np.concatenate(places), np.concatenate(rows)) if places else None


def _pack_mrope(extend: Sequence[ExtendRow]) -> np.ndarray | None:
    if all([row.mrope is None for row in extend]):
        return None
    return np.concatenate([row.mrope if row.mrope is not None else _equal_axes(row) for row in extend], axis=1)


def _equal_axes(row: ExtendRow) -> np.ndarray:
    """[3, n] int32."""
    return np.tile(np.arange(row.computed, row.computed + len(row.tokens), dtype=np.int32), (3, 1))


def pack_rows(decode: DecodeRows, tokens_per_row: int, forks: bool, new_pages: np.ndarray) -> StepArrays[np.ndarray]:
    """Decode rows of T `tokens_per_row`: all that a decode graph needs. With `forks` drafts may be trees."""
    drafts = _pack_drafts(decode, tokens_per_row, forks) if tokens_per_row > 1 else None
    return StepArrays(decode.rows, decode.computed + tokens_per_row, decode.output_indices, new_pages, drafts)


def pack_tables(plan: StepPlan) -> TableChanges[np.ndarray] | None:
    """A step's table changes; None for none."""
    admissions = pages = copies = None
    if plan.admissions:
        columns = int32_array([(a.row, a.state_slot, a.phase) for a in plan.admissions]).T
        admissions = AdmissionArrays(columns[0], columns[1], columns[2], SamplingTable.pack(plan.admissions))
    if plan.page_writes:
        pages = _page_entries(plan.page_writes)
    if plan.page_copies:
        copies = PageCopies(*(np.stack(sets) for sets in zip(*[(c.sources, c.targets) for c in plan.page_copies])))
    return TableChanges(admissions, pages, copies) if admissions or pages or copies else None


def _page_entries(writes: Sequence[PageWrite]) -> PageEntries[np.ndarray] | None:
    rows, counts, indices, pages = list[int](), list[int](), list[np.ndarray](), list[np.ndarray]()
    for write in writes:
        rows.append(write.row)
        counts.append(count := len(write.pages))
        indices.append(np.arange(write.first_page, write.first_page + count, dtype=np.int32))
        pages.append(write.pages)
    if not any(counts):
        return None
    return PageEntries(np.repeat(int32_array(rows), counts), np.concatenate(indices), np.concatenate(pages))


def _pack_drafts(decode: DecodeRows, width: int, forks: bool) -> DraftArrays[np.ndarray]:
    real = np.arange(width - 1) < decode.num_drafts[:, None]
    tokens = np.zeros((len(decode), width - 1), np.int32)
    tokens[real] = decode.drafts
    if not forks:
        return DraftArrays(decode.num_drafts, tokens)
    predecessors = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(decode), 1))
    if decode.predecessors is not None:
        predecessors[:, 1:][real] = decode.predecessors
    return DraftArrays(decode.num_drafts, tokens, predecessors, _ancestors(predecessors))


def _ancestors(predecessors: np.ndarray) -> np.ndarray:
    """`DraftArrays.ancestors` of predecessors [n, width] int32 (-1: the root has none). Padding continues a
    row as a chain."""
    n, width = predecessors.shape
    ancestors = np.ones((n, width), np.int32)
    for i in range(1, width):
        ancestors[:, i] = ancestors[np.arange(n), predecessors[:, i]] | 1 << i
    return ancestors


def spec_info_of(drafts: DraftArrays[torch.Tensor] | None, tokens_per_row: int) -> SpecInfo | None:
    """SpecInfo of a step of T `tokens_per_row`; None without drafts. `fill_relations` fills its mask."""
    if drafts is None:
        return None
    counts, mask = drafts.counts, None
    if drafts.predecessors is not None:
        mask = torch.zeros(len(counts), tokens_per_row, tokens_per_row, dtype=torch.bool, device=counts.device)
    return SpecInfo(tokens_per_row, drafts.predecessors, mask, counts)


def fill_relations(spec: SpecInfo, drafts: DraftArrays[torch.Tensor], bs: int, *positions: torch.Tensor) -> None:
    """For draft trees, fills the mask of `spec` for the first `bs` rows. Each tensor of `positions`
    holds the positions of the inputs' KV slots, and gets those of the inputs (`SpecInfo.positions`)."""
    if spec.mask is None or drafts.ancestors is None:
        return
    inputs = torch.arange(spec.tokens_per_row, dtype=torch.int32, device=spec.mask.device)
    spec.mask[:bs] = (drafts.ancestors[:bs, :, None] >> inputs & 1).bool()
    for each in positions:
        each.copy_(spec.positions(each))


def _flat(parts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(p, np.int32) for p in parts])


class StagingRing:
    """Host-to-device copies that the host does not wait for.

    Three pinned buffers are used in turn, each after the event of its last copy. On a CPU the host
    buffer itself serves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: list[torch.Tensor | None] = [None] * 3
        self._views: list[tuple[torch.Tensor, np.ndarray] | None] = [None] * 3  # views of the last size, for each
        self._events: list[DeviceEvent] = [PAST] * 3
        self._next = 0

    def upload(self, record: Record) -> Any:
        """The record with its arrays in new device memory, by one copy."""
        arrays = arrays_of(record)
        into = torch.empty(packed_size(arrays), dtype=torch.int32, device=self.device)
        self.copy(into, arrays)
        return unpack(record, into, arrays)

    def copy(self, into: torch.Tensor, arrays: Sequence[np.ndarray]) -> None:
        """One copy of all arrays into [packed_size] int32."""
        staging, flat = self._staging(into)
        pack_arrays(arrays, flat)
        self._copy(into, staging)

    def copy_packed(self, into: torch.Tensor, packed: np.ndarray) -> None:
        """One copy of [packed_size] int32, which may change as soon as this returns."""
        staging, flat = self._staging(into)
        flat[:] = packed
        self._copy(into, staging)

    def copy_rows(
        self, into: torch.Tensor, arrays: Sequence[np.ndarray], padding: np.ndarray, starts: Sequence[int]
    ) -> None:
        """One copy of `padding` [packed_size] int32, in which an array's rows replace the start of
        its section (`starts[i]`). Arrays may be shorter than their section."""
        staging, flat = self._staging(into)
        flat[:] = padding
        for array, start in zip(arrays, starts):
            if size := array.size:
                flat[start : start + size] = array if array.ndim == 1 else array.reshape(-1)
        self._copy(into, staging)

    def _staging(self, into: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Pinned memory as tensor and array; on a CPU `into` itself."""
        if self.device.type == "cpu":
            return into, into.numpy()
        i, size = self._next, into.numel()
        event, pinned, views = self._events[i], self._pinned[i], self._views[i]
        event.synchronize()  # done long ago unless the host runs far ahead
        if views is None or len(views[1]) != size:
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


def enter_tables(pools: Pools, sampling_table: SamplingTable, changes: TableChanges[torch.Tensor]) -> None:
    """Applies admissions (and zeroes their state slots), page-table entries and page copies."""
    table = pools.req_to_token
    if (admissions := changes.admissions) is not None:
        table.admit_rows(admissions.rows, admissions.state_slots, admissions.phases)
        sampling_table.enter_rows(admissions.rows.long(), admissions.sampling)
    if (entries := changes.pages) is not None:
        table.write_pages(entries.rows, entries.indices, entries.pages)
    if (copies := changes.copies) is not None:
        pools.kv.copy_pages(copies.sources.long(), copies.targets.long())


def fill_decode(
    inputs: TokenInputs,
    arrays: StepArrays[torch.Tensor],
    bs: int,
    spec: SpecInfo | None,
    last_tokens: torch.Tensor,
    table: HybridReqToTokenPool,
) -> None:
    """Computes the inputs of the first `bs` rows, and what they see in `spec`."""
    drafts = arrays.drafts
    step = DecodeRowInputs(
        arrays.rows[:bs], arrays.seq_lens[:bs], arrays.new_pages[:bs],
        *(() if drafts is None else (drafts.tokens[:bs], drafts.counts[:bs])),
    )  # fmt: skip
    decode_inputs(inputs, step, last_tokens, table.tables, table.page_size, table.mrope_deltas)
    if spec is not None and drafts is not None:
        turning = () if inputs.mrope_positions is None else (inputs.mrope_positions,)
        fill_relations(spec, drafts, bs, inputs.positions, *turning)


def make_batch(
    backend: AttentionBackend,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    inputs: TokenInputs,
    num_decode_rows: int,
    spec_info: SpecInfo | None,
    num_real: int | None = None,
    *,
    seq_lens_cpu: Sequence[int] | None = None,
    query_lens_cpu: Sequence[int] | None = None,
) -> ForwardBatch:
    """A step, with the mode of its segments. Arguments are the fields of ForwardBatch.

    Args:
        rows: [B] int32 request rows, `req_pool_indices`.
        inputs: of all tokens, those of decode rows first.
        num_real: None: all rows are real.
    """
    mode = ForwardMode.TARGET_VERIFY if spec_info else ForwardMode.DECODE
    if num_decode_rows < len(rows):
        mode = ForwardMode.MIXED if num_decode_rows else ForwardMode.EXTEND
    return ForwardBatch(
        mode, inputs.input_ids, inputs.positions, rows, seq_lens, query_start_loc, inputs.out_cache_loc,
        len(rows) if num_real is None else num_real, num_decode_rows, backend, seq_lens_cpu, query_lens_cpu,
        spec_info, mrope_positions=inputs.mrope_positions,
    )  # fmt: skip
