"""The arrays of a step that is padded to a bucket, made plainly: the step's own arrays, then what pads them."""

from collections.abc import Sequence

import numpy as np

from hybridrt.kernels.core.chunk_plan import ChunkArrays, most_chunks
from hybridrt.kernels.core.packed import int32_array, map_arrays
from hybridrt.kernels.core.records import SAVES_PER_PROMPT
from hybridrt.runtime.step.pack import AdmissionArrays, PageEntries, PromptArrays, StepArrays, TableChanges, pack_step
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from hybridrt.runtime.step.plan import DecodeRows, ExtendRow, StepPlan, int32s
from hybridrt.runtime.step.recurrent_arrays import (
    PassArrays,
    RecurrentArrays,
    Run,
    SavedArrays,
    one_pass_lists,
    pass_lists,
    runs_of,
)
from hybridrt.runtime.step.sampling_table import SamplingArrays, SamplingTable


def pack_plainly(
    plan: StepPlan, bucket: Bucket, sizes: Sequence[int], saves: StateSaves, seq_len_fill: int, groups: int = 1,
    mrope: bool = False,
) -> StepArrays[np.ndarray]:  # fmt: skip
    """What `PaddedStep` of the other arguments has after it has packed a step."""
    padded = _pad_step(plan, bucket, seq_len_fill)
    arrays, n = pack_step(padded, 1, groups=groups), len(plan.decode)
    assert arrays.prompts is not None
    sampling = [row for row in plan.extend if row.sample]
    chosen, first = [row.sample for row in plan.extend], bucket.decode_rows
    ends = arrays.prompts.query_start_loc[first + 1 : first + 1 + len(chosen)][chosen] - 1
    sampled = bucket.decode_rows + bucket.prompts
    indices = np.concatenate((plan.decode.output_indices, int32s(row.output_index for row in sampling)))
    rows = np.concatenate((plan.decode.rows, int32s(row.row for row in sampling)))
    positions = arrays.prompts.positions.copy()
    positions[sum(len(row.tokens) for row in plan.extend) :] = 0  # rotary tables end with the longest request
    prompts = PromptArrays(
        arrays.prompts.query_start_loc, _pad(np.concatenate((np.arange(n, dtype=np.int32), ends)), sampled),
        _pad(rows, sampled), arrays.prompts.input_ids, arrays.prompts.rows, positions, None,
        _recurrent(padded.extend, bucket, sizes, saves), mrope=_turning(plan, bucket) if mrope else None,
    )  # fmt: skip
    return StepArrays(
        arrays.rows,
        arrays.seq_lens,
        _pad(indices, sampled),
        arrays.new_pages,
        None,
        prompts,
        _tables(plan, bucket, groups),
    )


def _turning(plan: StepPlan, bucket: Bucket) -> np.ndarray:
    places = [row.computed + np.arange(len(row.tokens)) if row.mrope is None else row.mrope[2] for row in plan.extend]
    return _pad(np.concatenate(places), bucket.tokens)


def _pad(array: np.ndarray, count: int) -> np.ndarray:
    """[count, ...], zeros at the end."""
    return np.pad(array, [(0, count - len(array))] + [(0, 0)] * (array.ndim - 1))


def _pad_step(plan: StepPlan, bucket: Bucket, seq_len_fill: int) -> StepPlan:
    """The rows of a step with those that pad it."""
    decode, extend = plan.decode, plan.extend
    missing, left = bucket.decode_rows - len(decode), bucket.tokens - sum(len(row.tokens) for row in extend)
    zeros, computed = np.zeros(missing, np.int32), np.full(missing, seq_len_fill - 1, np.int32)
    ends = (decode.rows, zeros), (decode.computed, computed), (decode.output_indices, zeros), (decode.num_drafts, zeros)
    padding = [ExtendRow(0, 0, [0] * left, 0, False)]
    padding += [ExtendRow(0, 0, (), 0, False)] * (bucket.prompts - len(extend))
    return StepPlan(decode=DecodeRows(*map(np.concatenate, ends)), extend=[*extend, *padding])


def _tables(plan: StepPlan, bucket: Bucket, groups: int) -> TableChanges[np.ndarray]:
    """What pads them is of the scratch entries: request row 0, slot 0 and page 0."""
    admissions, writes, prompts, entries = plan.admissions, plan.page_writes, bucket.prompts, bucket.entries
    constants = SamplingTable.pack_constants(admissions)
    return TableChanges(
        AdmissionArrays(
            _pad(int32s(a.row for a in admissions), prompts),
            _pad(int32s(a.state_slot for a in admissions), prompts),
            _pad(int32s(a.phase for a in admissions), prompts),
            SamplingArrays(_pad(constants[:, :2], prompts), _pad(constants[:, 2:], prompts)),
        ),
        PageEntries(
            _pad(int32s(write.row for write in writes for _ in write.pages), entries),
            _pad(int32s(write.first_page + i for write in writes for i in range(len(write.pages))), entries),
            _pad(np.concatenate([np.empty((0, groups), np.int32), *(write.pages for write in writes)]), entries),
        ),
        None,
    )


def _recurrent(
    extend: Sequence[ExtendRow], bucket: Bucket, sizes: Sequence[int], saves: StateSaves
) -> RecurrentArrays[np.ndarray]:
    if saves is StateSaves.SECOND_PASS:
        return RecurrentArrays(passes=_passes(extend, bucket, sizes))
    rows: RecurrentArrays[np.ndarray] = map_arrays(int32_array, one_pass_lists(extend, sizes))
    counts = [most_chunks(len(extend), bucket.tokens, size) + saves.most * bucket.prompts for size in sizes]
    saved = None
    if saves is StateSaves.AT_CHUNKS:
        none = np.zeros((len(extend), SAVES_PER_PROMPT), np.int32)
        found = rows.saves or SavedArrays(none, none, tuple(none[0, :0] for _ in sizes))
        slots = tuple(_pad(slots, count) for slots, count in zip(found.chunk_slots, counts))
        saved = SavedArrays(found.row_slots, found.row_lengths, slots)
    chunks = tuple(_pad_chunks(plan, count) for plan, count in zip(rows.chunks, counts))
    return RecurrentArrays(int32s(row.read_state_slot for row in extend), chunks, saved)


def _passes(
    extend: Sequence[ExtendRow], bucket: Bucket, sizes: Sequence[int]
) -> tuple[PassArrays[np.ndarray], PassArrays[np.ndarray]]:
    """The two passes over the rows of a bucket. A prompt that saves a state has two runs in the first one."""
    last, first, second = len(extend) - 1, runs_of(extend, 0), runs_of(extend, 1)
    behind = sum(run.length for run in second)
    first += [Run(last, -1, -1, 0, bucket.tokens, 0)] * (2 * bucket.prompts + 1 - len(first))
    second.append(Run(last, -1, -1, 0, 0, bucket.tail - behind))
    second += [Run(last, -1, -1, 0, 0, 0)] * (bucket.prompts + 1 - len(second))
    passes = []
    for number, (runs, tokens) in enumerate(((first, bucket.tokens), (second, bucket.tail))):
        part: PassArrays[np.ndarray] = map_arrays(int32_array, pass_lists(runs, number, sizes))
        chunks = [_pad_chunks(p, most_chunks(len(runs), tokens, size)) for p, size in zip(part.chunks, sizes)]
        passes.append(part._replace(chunks=tuple(chunks)))
    places = passes[1].tokens
    assert places is not None
    places[behind:] = 0
    return passes[0], passes[1]


def _pad_chunks(plan: ChunkArrays[np.ndarray], count: int) -> ChunkArrays[np.ndarray]:
    """A chunk plan with `count` chunks: those after the last one have no tokens."""
    ends = np.pad(plan.cu_chunk_seqlens, (0, count - len(plan.seq_idx)), "edge")
    return plan._replace(cu_chunk_seqlens=ends, seq_idx=_pad(plan.seq_idx, count))
