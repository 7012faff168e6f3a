"""Pads a step with prompts to the sizes of its bucket, so that one graph serves all steps that fit.

A bucket has so many decode rows, prompts, and tokens of all of them. What a step leaves of it is padding, which belongs
to request row 0 and to no state slot. Behind the prompts stands one padding row that has all tokens that are left, then
rows without tokens. So every token of a graph belongs to a row, and the rows' tokens always add up to the bucket's.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from hybridrt.kernels.chunk_plan import most_chunks, pad_chunks
from hybridrt.runtime.saved_states import pack_saved_states
from hybridrt.runtime.step import DecodeRows, ExtendRow, StepPlan
from hybridrt.runtime.step_inputs import Columns, chunk_names, pack_batch, pack_bookkeeping, pad_bookkeeping
from hybridrt.runtime.step_passes import Run, in_pass, pack_runs, runs_of

# Of a step; larger ones keep a device busy without graphs. Padding costs what tokens cost, unless there are fewer than
# 200 or so: then the weights take longer to read.
PROMPT_TOKENS = (128, 256, 384, 512, 768, 1024)
DECODE_ROWS = (0, 32, 64, 128)
# A bucket of this size counts its decode rows, too. Large products go in tiles of 128 tokens, so that 320 tokens of
# prompts beside 64 rows take about as long as 256 (13.1 and 12.4 ms, Falcon-H1-7B on an H200; 384 take 15.5). The other
# sizes are lengths that prompts and chunks often have, and count those alone.
SHARED_TOKENS = 384
PROMPT_ROWS, TOKENS_OF_ONE = 8, 64  # most prompts of a bucket, which has room for one in so many tokens
CACHED_PAGES = 1024  # entries of page tables that a bucket has room for, beside one for each of its tokens
TAIL = 16  # tokens behind a saved state, in the mean of the prompts: states stand on a grid, usually of 16 tokens


class Bucket(NamedTuple):
    """Steps of up to `decode_rows` rows of one token and `tokens` tokens of prompts."""

    decode_rows: int
    tokens: int

    @property
    def prompts(self) -> int:
        """Most prompts of a step: what a graph has room for costs it time, and few short prompts come at once."""
        return min(max(self.tokens // TOKENS_OF_ONE, 1), PROMPT_ROWS)

    @property
    def tail(self) -> int:
        """Most tokens that stand behind saved states, of all prompts."""
        return TAIL * self.prompts

    def has_room(self, decode_rows: int, prompts: int, tokens: int) -> bool:
        """Whether a step with so many decode rows, prompts, and tokens of prompts fits, if it saves no states."""
        return decode_rows <= self.decode_rows and prompts <= self.prompts and tokens <= self.tokens

    @property
    def entries(self) -> int:
        """Most page-table entries that a graph makes."""
        return CACHED_PAGES + self.decode_rows + self.tokens

    def enters(self, plan: StepPlan) -> bool:
        """Whether a graph changes the tables as a step says."""
        admissions, entries = plan.admissions, sum(len(write.pages) for write in plan.page_writes)
        special = plan.page_copies or any(a.rules is not None or a.params.uses_penalties for a in admissions)
        return not special and len(admissions) <= self.prompts and entries <= self.entries

    def holds(self, plan: StepPlan, saves: "StateSaves") -> bool:
        """Whether a step has prompts, and fits, with the states that it saves within them."""
        rows, tokens = plan.extend, sum(len(row.tokens) for row in plan.extend)
        if not rows or not self.has_room(len(plan.decode), len(rows), tokens):
            return False
        behind = [len(row.tokens) - row.saves[0][0] for row in rows if row.saves]
        if not behind or saves is StateSaves.NONE:
            return not behind
        fits = saves is StateSaves.AT_CHUNKS or sum(behind) <= self.tail
        return fits and all(len(row.saves) < 2 for row in rows)


def make_buckets(decode_rows: Iterable[int], prompt_tokens: Iterable[int]) -> list[Bucket]:
    """A bucket for each number of decode rows and each size, by decode rows and then by tokens."""
    sizes = list(prompt_tokens)
    tokens = {rows: {n - rows if n == SHARED_TOKENS else n for n in sizes} for rows in decode_rows}
    return [Bucket(rows, n) for rows in sorted(tokens) for n in sorted(tokens[rows])]


class StateSaves(Enum):
    """How a graph leaves states within its prompts, one of a prompt at most."""

    NONE = auto()
    AT_CHUNKS = auto()  # behind a chunk that ends there
    SECOND_PASS = auto()  # a first pass ends there, a second one computes the tokens behind


def pack_padded(plan: StepPlan, bucket: Bucket, sizes: Sequence[int], saves: StateSaves, seq_len_fill: int) -> Columns:
    """`pack_bookkeeping` and `pack_batch` of a step, padded. The shapes depend on the other arguments alone.

    Args:
        sizes: of chunks.
        seq_len_fill: tokens of a padding row of the decode segment.
    """
    padded = pad_step(plan, bucket, seq_len_fill)
    columns = pad_bookkeeping(pack_bookkeeping(plan), bucket.prompts, bucket.entries) | pack_batch(padded, 1)
    real = sum(len(row.tokens) for row in plan.extend)
    columns["extend_positions"][real:] = 0  # rotary tables end with the longest request
    columns |= _sampled(plan, columns, bucket)
    if saves is StateSaves.SECOND_PASS:
        columns.pop("read_state_slots", None)
        return columns | _pack_passes(padded.extend, bucket, sizes)
    columns["read_state_slots"] = np.array([row.read_state_slot for row in padded.extend], np.int32)
    return columns | _pack_chunks(padded.extend, bucket, sizes, saves)


def pad_step(plan: StepPlan, bucket: Bucket, seq_len_fill: int) -> StepPlan:
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


def _pack_chunks(extend: Sequence[ExtendRow], bucket: Bucket, sizes: Iterable[int], saves: StateSaves) -> Columns:
    """The chunk plans of a bucket's prompts, padded. With AT_CHUNKS also `SavedStates`."""
    spare = bucket.prompts  # a saved state divides a chunk
    columns = pack_saved_states(extend, sizes, lambda size: most_chunks(len(extend), bucket.tokens, size) + spare)
    if saves is StateSaves.AT_CHUNKS:
        return columns
    return {packed: columns[packed] for size in sizes for packed in chunk_names(size).values()}


def _pack_passes(extend: Sequence[ExtendRow], bucket: Bucket, sizes: Iterable[int]) -> Columns:
    """The two passes over a bucket's prompts, padded. A prompt that saves a state has two runs in the first one."""
    last, (first, second) = len(extend) - 1, (runs_of(extend, number) for number in (0, 1))
    behind = sum(run.length for run in second)
    first += [Run(last, -1, -1, 0, bucket.tokens, 0)] * (2 * bucket.prompts + 1 - len(first))
    second.append(Run(last, -1, -1, 0, 0, bucket.tail - behind))
    second += [Run(last, -1, -1, 0, 0, 0)] * (bucket.prompts + 1 - len(second))
    columns = pack_runs(first, 0, sizes) | pack_runs(second, 1, sizes)
    # What pads the second pass stands for token 0, which is never behind a saved state.
    columns[in_pass("tokens", 1)][behind:] = 0
    for number, (runs, tokens) in enumerate(((first, bucket.tokens), (second, bucket.tail))):
        for size in sizes:
            names = {name: in_pass(packed, number) for name, packed in chunk_names(size).items()}
            plan = {name: columns[packed] for name, packed in names.items()}
            plan = pad_chunks(plan, most_chunks(len(runs), tokens, size))
            columns |= {names[name]: column for name, column in plan.items()}
    return columns
