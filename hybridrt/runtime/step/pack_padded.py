"""Pads a step with prompts to the sizes of its bucket, so that one graph serves all steps that fit.

A bucket has so many decode rows, prompts, and tokens of all of them. What a step leaves of it is padding, which belongs
to request row 0 and to no state slot. Behind the prompts stands one padding row that has all tokens that are left, then
rows without tokens. So every token of a graph belongs to a row, and the rows' tokens always add up to the bucket's.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch

from hybridrt.kernels.core.chunk_plan import most_chunks
from hybridrt.runtime.step.pack import chunk_names, cut, packed_size
from hybridrt.runtime.step.plan import DecodeRows, ExtendRow, StepPlan
from hybridrt.runtime.step.sampling_table import SamplingTable
from hybridrt.runtime.step.saved_states import saved_state_lists
from hybridrt.runtime.step.step_passes import RUN_COLUMNS, Run, in_pass, run_lists, runs_of

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


class PaddedColumns:
    """The columns of a bucket's steps, padded: views of one array that is made once and filled anew for each step. A
    first token waits for it, so what pads is copied in one go, and a step writes its own numbers alone.

    Args:
        sizes: of chunks.
        seq_len_fill: tokens of a padding row of the decode segment.

    Attributes:
        flat: [packed_size] int32, what is copied to the device.
        shapes: of the sections of `flat`.
        columns: by name, views of `flat`: what `pack_bookkeeping` and `pack_batch` pack, `sample_at`, `sample_rows` and
            `output_indices` without gaps, and the chunk plans, saved states or passes.
    """

    def __init__(self, bucket: Bucket, sizes: Sequence[int], saves: StateSaves, seq_len_fill: int) -> None:
        self._bucket, self._sizes, self._saves = bucket, sizes, saves
        self.shapes = _shapes(bucket) | _recurrent_shapes(bucket, sizes, saves)
        self.flat = np.zeros(packed_size(self.shapes), np.int32)
        sections = cut(torch.from_numpy(self.flat), self.shapes)
        self.columns = {name: section.numpy() for name, section in sections.items()}
        self._fill_padding(seq_len_fill)
        self._padding = self.flat.copy()

    def pack(self, plan: StepPlan) -> None:
        """Fills the columns with a step that the bucket holds. Of what changes in tables it has what a graph enters."""
        self.flat[:] = self._padding
        self._pack_bookkeeping(plan)
        self._pack_decode(plan.decode)
        self._pack_prompts(plan.extend, len(plan.decode))
        for name, values in self._recurrent(plan.extend).items():
            if name in self.columns:
                self.columns[name][: len(values)] = values

    def _fill_padding(self, seq_len_fill: int) -> None:
        """What differs from 0 where a step has nothing. Positions are 0: rotary tables end with the longest request."""
        columns, (rows, tokens) = self.columns, self._bucket
        columns["seq_lens"][:rows] = seq_len_fill
        columns["new_pages"][:] = -1
        columns["query_start_loc"][:] = np.minimum(np.arange(len(columns["query_start_loc"])), rows)
        columns["query_start_loc"][rows + 1 :] += tokens
        for name, column in columns.items():
            if name.startswith("cu_chunk_seqlens"):  # all chunks of a pass have as many tokens as its runs
                column[1:] = self._bucket.tail if name.endswith(in_pass("", 1)) else tokens
            elif name.startswith("last_chunk"):
                column[:] = -1

    def _pack_bookkeeping(self, plan: StepPlan) -> None:
        columns, admissions, start = self.columns, plan.admissions, 0
        if n := len(admissions):
            constants = SamplingTable.pack_constants(admissions)
            columns["seeds"][:n], columns["constants"][:n] = constants[:, :2], constants[:, 2:]
            columns["admit_rows"][:n] = [a.row for a in admissions]
            columns["admit_state_slots"][:n] = [a.state_slot for a in admissions]
            columns["admit_phases"][:n] = [a.phase for a in admissions]
        for write in plan.page_writes:
            end = start + len(write.pages)
            columns["page_rows"][start:end] = write.row
            columns["page_indices"][start:end] = np.arange(write.first_page, write.first_page + end - start)
            columns["pages"][start:end] = write.pages
            start = end

    def _pack_decode(self, decode: DecodeRows) -> None:
        if n := len(decode):
            columns = self.columns
            columns["rows"][:n] = columns["sample_rows"][:n] = decode.rows
            columns["output_indices"][:n] = decode.output_indices
            columns["sample_at"][:n] = np.arange(n)
            np.add(decode.computed, 1, out=columns["seq_lens"][:n])

    def _pack_prompts(self, extend: Sequence[ExtendRow], decoding: int) -> None:
        columns, first, count, start = self.columns, self._bucket.decode_rows, len(extend), 0
        ends = list[int]()
        for row in extend:
            end = start + len(row.tokens)
            columns["input_ids"][start:end] = row.tokens
            columns["extend_rows"][start:end] = row.row
            columns["extend_positions"][start:end] = np.arange(row.computed, row.computed + end - start)
            ends.append(first + end)
            start = end
        prompts, lens = slice(first, first + count), [row.computed + len(row.tokens) for row in extend]
        columns["rows"][prompts] = [row.row for row in extend]
        columns["seq_lens"][first : first + count + 1] = [*lens, self._bucket.tokens - start]
        columns["query_start_loc"][first + 1 : first + 1 + count] = ends
        sampling = [(end - 1, row.row, row.output_index) for row, end in zip(extend, ends) if row.sample]
        for name, values in zip(("sample_at", "sample_rows", "output_indices"), zip(*sampling)):
            columns[name][decoding : decoding + len(values)] = values

    def _recurrent(self, extend: Sequence[ExtendRow]) -> dict[str, list[int]]:
        """What the recurrent layers need of the prompts: the first values of columns."""
        left = self._bucket.tokens - sum(len(row.tokens) for row in extend)
        padded = [*extend, ExtendRow(0, 0, range(left), 0, False)]
        if self._saves is StateSaves.SECOND_PASS:
            return _pass_lists(padded, self._bucket, self._sizes)
        return saved_state_lists(padded, self._sizes) | {"read_state_slots": [row.read_state_slot for row in extend]}


def _shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Of the sections that every graph has."""
    rows, prompts, tokens, none = bucket.decode_rows, bucket.prompts, bucket.tokens, (0,)
    sampled, batch = (rows + prompts,), (rows + prompts + 1,)
    return {
        "seeds": (prompts, 2), "constants": (prompts, SamplingTable.CONSTANTS),
        "penalty_rows": none, "output_tokens": none, "prompt_tokens": none,
        **dict.fromkeys(("admit_rows", "admit_state_slots", "admit_phases"), (prompts,)),
        **dict.fromkeys(("page_rows", "page_indices", "pages"), (bucket.entries,)),
        "copy_sources": none, "copy_targets": none,
        "rows": batch, "seq_lens": batch, "output_indices": sampled, "new_pages": (rows,),
        "query_start_loc": (rows + prompts + 2,), "sample_at": sampled, "sample_rows": sampled,
        **dict.fromkeys(("input_ids", "extend_rows", "extend_positions"), (tokens,)),
    }  # fmt: skip


def _recurrent_shapes(bucket: Bucket, sizes: Sequence[int], saves: StateSaves) -> dict[str, tuple[int, ...]]:
    """Of the sections that recurrent layers need."""
    rows, lengths = bucket.prompts + 1, dict[str, int]()
    if saves is StateSaves.SECOND_PASS:
        for number, (runs, tokens) in enumerate(((2 * rows - 1, bucket.tokens), (rows, bucket.tail))):
            of_pass = dict.fromkeys(RUN_COLUMNS, runs) | {"query_start_loc": runs + 1, "tokens": number * tokens}
            for size in sizes:
                of_pass |= _chunk_lengths(size, runs, most_chunks(runs, tokens, size))
            lengths |= {in_pass(name, number): length for name, length in of_pass.items()}
        return {name: (length,) for name, length in lengths.items()}
    at_chunks = saves is StateSaves.AT_CHUNKS
    lengths |= dict.fromkeys(("read_state_slots", *(("row_slots", "row_lengths") if at_chunks else ())), rows)
    for size in sizes:
        count = most_chunks(rows, bucket.tokens, size) + bucket.prompts  # a saved state divides a chunk
        lengths |= _chunk_lengths(size, rows, count) | ({f"saves of {size}": count} if at_chunks else {})
    return {name: (length,) for name, length in lengths.items()}


def _chunk_lengths(size: int, rows: int, count: int) -> dict[str, int]:
    """Of the columns of a plan of `count` chunks. Those behind a step's last chunk have no tokens."""
    return dict(zip(chunk_names(size).values(), (count + 1, count, rows, rows)))


def _pass_lists(extend: Sequence[ExtendRow], bucket: Bucket, sizes: Iterable[int]) -> dict[str, list[int]]:
    """The two passes over a bucket's prompts and the padding row behind them, with runs without tokens up to the
    bucket's number. A prompt that saves a state has two runs in the first pass."""
    last, (first, second) = bucket.prompts, (runs_of(extend, number) for number in (0, 1))
    behind = sum(run.length for run in second)
    first += [Run(row, 0, 0, 0, bucket.tokens, 0) for row in range(len(extend), bucket.prompts + 1)]
    first += [Run(last, -1, -1, 0, bucket.tokens, 0)] * (2 * bucket.prompts + 1 - len(first))
    second.append(Run(last, -1, -1, 0, 0, bucket.tail - behind))
    second += [Run(last, -1, -1, 0, 0, 0)] * (bucket.prompts + 1 - len(second))
    lists = run_lists(first, 0, sizes) | run_lists(second, 1, sizes)
    # What pads the second pass stands for token 0, which is never behind a saved state.
    del lists[in_pass("tokens", 1)][behind:]
    return lists
