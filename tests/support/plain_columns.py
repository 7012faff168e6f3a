"""The columns of a step that is padded to a bucket, made plainly: the step's own columns with what pads them behind."""

from collections.abc import Iterable, Sequence

import numpy as np

from hybridrt.kernels.core.chunk_plan import CHUNK_COLUMNS, most_chunks
from hybridrt.runtime.step.pack import Columns, chunk_names, pack_batch, pack_bookkeeping
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from hybridrt.runtime.step.plan import DecodeRows, ExtendRow, StepPlan, int32s
from hybridrt.runtime.step.saved_states import saved_state_lists
from hybridrt.runtime.step.step_passes import Run, in_pass, run_lists, runs_of

OF_ROWS = ("admit_rows", "admit_state_slots", "admit_phases", "seeds", "constants")
OF_PAGES = ("page_rows", "page_indices", "pages")


def pack_plainly(plan: StepPlan, bucket: Bucket, sizes: Sequence[int], saves: StateSaves, seq_len_fill: int) -> Columns:
    """What `PaddedColumns` of the other arguments has after it has packed a step."""
    padded = _pad_step(plan, bucket, seq_len_fill)
    columns = _tables(plan, bucket) | pack_batch(padded, 1)
    real = sum(len(row.tokens) for row in plan.extend)
    columns["extend_positions"][real:] = 0  # rotary tables end with the longest request
    columns |= _sampled(plan, columns, bucket)
    if saves is StateSaves.SECOND_PASS:
        columns.pop("read_state_slots", None)
        return columns | _passes(padded.extend, bucket, sizes)
    columns["read_state_slots"] = int32s(row.read_state_slot for row in padded.extend)
    return columns | _chunks(padded.extend, bucket, sizes, saves)


def _pad_step(plan: StepPlan, bucket: Bucket, seq_len_fill: int) -> StepPlan:
    """The rows of a step with those that pad it."""
    decode, extend = plan.decode, plan.extend
    missing, left = bucket.decode_rows - len(decode), bucket.tokens - sum(len(row.tokens) for row in extend)
    zeros, computed = np.zeros(missing, np.int32), np.full(missing, seq_len_fill - 1, np.int32)
    ends = (decode.rows, zeros), (decode.computed, computed), (decode.output_indices, zeros), (decode.num_drafts, zeros)
    padding = [ExtendRow(0, 0, [0] * left, 0, False)]
    padding += [ExtendRow(0, 0, (), 0, False)] * (bucket.prompts - len(extend))
    return StepPlan(decode=DecodeRows(*map(np.concatenate, ends)), extend=[*extend, *padding])


def _sampled(plan: StepPlan, columns: Columns, bucket: Bucket) -> Columns:
    """The tokens that a step samples from, first and without gaps: sample_at, sample_rows and output_indices, of as
    many lines as a bucket samples at most."""
    n, chosen = len(plan.decode), [row.sample for row in plan.extend]
    first = bucket.decode_rows
    ends = columns["query_start_loc"][first + 1 : first + 1 + len(chosen)][chosen] - 1
    sampling = [row for row in plan.extend if row.sample]
    parts = {
        "sample_at": (np.arange(n, dtype=np.int32), ends),
        "sample_rows": (plan.decode.rows, np.array([row.row for row in sampling], np.int32)),
        "output_indices": (plan.decode.output_indices, np.array([row.output_index for row in sampling], np.int32)),
    }
    padding = np.zeros(bucket.decode_rows + bucket.prompts - n - len(sampling), np.int32)
    return {name: np.concatenate((*part, padding)) for name, part in parts.items()}


def _tables(plan: StepPlan, bucket: Bucket) -> Columns:
    """`pack_bookkeeping`. What pads it is of the scratch entries: request row 0, slot 0 and page 0."""
    columns = pack_bookkeeping(plan)
    for name in (*OF_ROWS, *OF_PAGES):
        missing = (bucket.prompts if name in OF_ROWS else bucket.entries) - len(columns[name])
        columns[name] = np.pad(columns[name], [(0, missing)] + [(0, 0)] * (columns[name].ndim - 1))
    return columns


def _chunks(extend: Sequence[ExtendRow], bucket: Bucket, sizes: Iterable[int], saves: StateSaves) -> Columns:
    """Chunk plans with room for the most chunks; where a state may be saved at the end of each, their slots, too."""
    columns = {name: int32s(values) for name, values in saved_state_lists(extend, sizes).items()}
    for size in sizes:
        names = chunk_names(size)
        count = most_chunks(len(extend), bucket.tokens, size) + bucket.prompts
        plan = _pad_chunks({name: columns[packed] for name, packed in names.items()}, count)
        columns |= {names[name]: column for name, column in plan.items()}
        saved = columns[f"saves of {size}"]
        columns[f"saves of {size}"] = np.pad(saved, (0, count - len(saved)))
    if saves is StateSaves.AT_CHUNKS:
        return columns
    return {packed: columns[packed] for size in sizes for packed in chunk_names(size).values()}


def _passes(extend: Sequence[ExtendRow], bucket: Bucket, sizes: Iterable[int]) -> Columns:
    """The two passes over the rows of a bucket. A prompt that saves a state has two runs in the first one."""
    last, (first, second) = len(extend) - 1, (runs_of(extend, number) for number in (0, 1))
    behind = sum(run.length for run in second)
    first += [Run(last, -1, -1, 0, bucket.tokens, 0)] * (2 * bucket.prompts + 1 - len(first))
    second.append(Run(last, -1, -1, 0, 0, bucket.tail - behind))
    second += [Run(last, -1, -1, 0, 0, 0)] * (bucket.prompts + 1 - len(second))
    lists = run_lists(first, 0, sizes) | run_lists(second, 1, sizes)
    columns = {name: int32s(values) for name, values in lists.items()}
    columns[in_pass("tokens", 1)][behind:] = 0
    for number, (runs, tokens) in enumerate(((first, bucket.tokens), (second, bucket.tail))):
        for size in sizes:
            names = {name: in_pass(packed, number) for name, packed in chunk_names(size).items()}
            plan = {name: columns[packed] for name, packed in names.items()}
            plan = _pad_chunks(plan, most_chunks(len(runs), tokens, size))
            columns |= {names[name]: column for name, column in plan.items()}
    return columns


def _pad_chunks(plan: Columns, count: int) -> Columns:
    """A chunk plan with `count` chunks: those behind the last one have no tokens."""
    ends, seq_idx, first, last = (plan[name] for name in CHUNK_COLUMNS)
    missing = count - len(seq_idx)
    return dict(zip(CHUNK_COLUMNS, (np.pad(ends, (0, missing), "edge"), np.pad(seq_idx, (0, missing)), first, last)))
