"""Pads a step with prompts to the sizes of its bucket, so that one graph serves all steps that fit.

Padding has request row 0 and no state slot. One padding row after the prompts has all remaining
tokens of the bucket; later ones have none.
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import torch

from hybridrt.kernels.core.chunk_plan import ChunkArrays, most_chunks
from hybridrt.kernels.core.packed import Record, arrays_of, map_arrays, pack_arrays, packed_size, unpack
from hybridrt.kernels.core.records import SAVES_PER_PROMPT
from hybridrt.runtime.step.pack import AdmissionArrays, PageEntries, PromptArrays, StepArrays, TableChanges
from hybridrt.runtime.step.plan import DecodeRows, ExtendRow, StepPlan
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

# Prompt tokens of a step; larger ones keep a device busy without graphs. Padding costs as much as
# tokens, unless there are fewer than 200 or so: then reading the weights takes longer.
PROMPT_TOKENS = (128, 256, 384, 512, 896, 1152, 1536, 2304)
DECODE_ROWS = (0, 32, 64, 128, 256)
# These sizes count decode rows + prompt tokens, because products go in tiles of 128 tokens: 320 prompt tokens with 64
# rows take about as long as 256 (13.1 and 12.4 ms, Falcon-H1-7B on an H200; 384 take 15.5), and 1,120 with 32 rows as
# long as 1,024. The others count prompt tokens only: many prompts have just so many. 2,304 tokens of both are two
# rounds of the multiprocessors in the down projection, 1,664 are one and a part: next to 256 rows 2,048 prompt tokens
# take 65.9 ms, 1,536 take 53.5.
SHARED_TOKENS = (384, 896, 1152, 2304)
# Graphs of larger sizes than SMALL_TOKENS have room for at least ROWS_OF_LARGE decode rows. Unused
# rows cost little there, and each further graph costs memory and time at the start.
SMALL_TOKENS, ROWS_OF_LARGE = 1152, 128
PROMPT_ROWS, TOKENS_OF_ONE = 8, 64  # most prompts, and tokens for each
CACHED_PAGES = 1024  # page-table entries besides one for each token
TAIL = 16  # mean tokens after a state that is saved before a second pass


class Bucket(NamedTuple):
    """Steps of up to `decode_rows` rows of one token and `tokens` prompt tokens."""

    decode_rows: int
    tokens: int

    @property
    def prompts(self) -> int:
        """Most prompts of a step. There are few: short prompts rarely come at once, and a graph takes
        longer for unused ones."""
        return min(max(self.tokens // TOKENS_OF_ONE, 1), PROMPT_ROWS)

    @property
    def tail(self) -> int:
        """Most tokens after saved states, of all prompts."""
        return TAIL * self.prompts

    def has_room(self, decode_rows: int, prompts: int, tokens: int) -> bool:
        """Whether such a step fits, if it saves no states."""
        return tokens <= self.tokens and decode_rows <= self.decode_rows and prompts <= self.prompts

    @property
    def entries(self) -> int:
        """Most page-table entries that a graph writes."""
        return CACHED_PAGES + self.decode_rows + self.tokens

    def enters(self, plan: StepPlan) -> bool:
        """Whether a graph can make a step's table changes."""
        admissions, entries = plan.admissions, sum(len(write.pages) for write in plan.page_writes)
        special = plan.page_copies or any(a.rules is not None or a.params.uses_penalties for a in admissions)
        return not special and len(admissions) <= self.prompts and entries <= self.entries

    def holds(self, plan: StepPlan, saves: "StateSaves") -> bool:
        """Whether a step has prompts and fits, with the states that it saves within them."""
        rows, tokens = plan.extend, sum(len(row.tokens) for row in plan.extend)
        if not rows or not self.has_room(len(plan.decode), len(rows), tokens) or plan.runs_eagerly:
            return False
        tails = [len(row.tokens) - row.saves[0][0] for row in rows if row.saves]
        fits = saves.tail is None or sum(tails) <= self.tail
        return fits and all(len(row.saves) <= saves.most for row in rows)


def make_buckets(decode_rows: Iterable[int], prompt_tokens: Iterable[int]) -> list[Bucket]:
    """A bucket for each number of decode rows and each size, by decode rows and then by tokens. Sizes
    above SMALL_TOKENS have only the larger numbers of decode rows.
    """
    sizes, numbers = list(prompt_tokens), set(decode_rows)
    large = min(ROWS_OF_LARGE, max(numbers, default=0))
    tokens = {rows: {n - rows if n in SHARED_TOKENS else n for n in sizes} for rows in numbers}
    return [
        Bucket(rows, n) for rows in sorted(tokens) for n in sorted(tokens[rows]) if n <= SMALL_TOKENS or rows >= large
    ]


class StateSaves(Enum):
    """How a graph saves states within its prompts."""

    NONE = auto()
    AT_CHUNKS = auto()  # a chunk of the scan ends there
    SECOND_PASS = auto()  # a second pass computes the rest

    @classmethod
    def of(cls, at_chunks: bool) -> "StateSaves":
        """`at_chunks`: `AttentionBackend.saves_at_chunks`."""
        return cls.AT_CHUNKS if at_chunks else cls.SECOND_PASS

    @property
    def most(self) -> int:
        """States of a prompt that a graph saves."""
        return SAVES_PER_PROMPT if self is StateSaves.AT_CHUNKS else int(self is StateSaves.SECOND_PASS)

    @property
    def tail(self) -> int | None:
        """Most tokens of a prompt after the last of them; None: any number."""
        return TAIL if self is StateSaves.SECOND_PASS else None


class PaddedStep:
    """A bucket's steps, padded: a record over one buffer that is filled anew for each step.

    A first token waits for it, so the padding is copied at once and a step writes only its own
    numbers.

    Args:
        sizes: chunk sizes of the backends.
        seq_len_fill: tokens of a padding row of the decode segment.
        groups: page groups.
        mrope: tokens have positions on three axes. Those of text are equal: one of them is packed.

    Attributes:
        flat: [packed_size] int32, what is copied to the device.
        arrays: views of `flat`. `sample_at`, `sample_rows` and `output_indices` have their padding
            at the end. Table updates are limited to those that the graph applies (`Bucket.enters`).
    """

    def __init__(
        self, bucket: Bucket, sizes: Sequence[int], saves: StateSaves, seq_len_fill: int, groups: int = 1, *,
        mrope: bool = False,
    ) -> None:  # fmt: skip
        self._bucket, self._sizes, self._saves = bucket, sizes, saves
        padding = _padding(bucket, sizes, saves, seq_len_fill, groups, mrope)
        arrays = arrays_of(padding)
        self.flat = np.zeros(packed_size(arrays), np.int32)
        pack_arrays(arrays, self.flat)
        self.arrays: StepArrays[np.ndarray] = map_arrays(
            torch.Tensor.numpy, unpack(padding, torch.from_numpy(self.flat))
        )
        self._padding = self.flat.copy()

    def pack(self, plan: StepPlan) -> None:
        """Fills the record with a step that the bucket holds and enters."""
        self.flat[:] = self._padding
        self._pack_tables(plan)
        self._pack_decode(plan.decode)
        self._pack_prompts(plan.extend, len(plan.decode))

    def _pack_tables(self, plan: StepPlan) -> None:
        tables, admissions, start = self.arrays.tables, plan.admissions, 0
        assert tables is not None and tables.admissions is not None and tables.pages is not None
        into, entries = tables.admissions, tables.pages
        if n := len(admissions):
            constants = SamplingTable.pack_constants(admissions)
            into.sampling.seeds[:n], into.sampling.constants[:n] = constants[:, :2], constants[:, 2:]
            into.rows[:n] = [a.row for a in admissions]
            into.state_slots[:n] = [a.state_slot for a in admissions]
            into.phases[:n] = [a.phase for a in admissions]
        for write in plan.page_writes:
            end = start + len(write.pages)
            entries.rows[start:end] = write.row
            entries.indices[start:end] = np.arange(write.first_page, write.first_page + end - start)
            entries.pages[start:end] = write.pages
            start = end

    def _pack_decode(self, decode: DecodeRows) -> None:
        if n := len(decode):
            arrays, prompts = self.arrays, self._prompts
            arrays.rows[:n] = prompts.sample_rows[:n] = decode.rows
            arrays.output_indices[:n] = decode.output_indices
            prompts.sample_at[:n] = np.arange(n)
            np.add(decode.computed, 1, out=arrays.seq_lens[:n])

    def _pack_prompts(self, extend: Sequence[ExtendRow], decoding: int) -> None:
        arrays, into, first, count = self.arrays, self._prompts, self._bucket.decode_rows, len(extend)
        ends, start = list[int](), 0
        for row in extend:
            end = start + len(row.tokens)
            into.input_ids[start:end] = row.tokens
            into.rows[start:end] = row.row
            into.positions[start:end] = np.arange(row.computed, row.computed + end - start)
            if into.mrope is not None:
                into.mrope[start:end] = into.positions[start:end] if row.mrope is None else row.mrope[0]
            ends.append(first + end)
            start = end
        lens, left = [row.computed + len(row.tokens) for row in extend], self._bucket.tokens - start
        arrays.rows[first : first + count] = [row.row for row in extend]
        arrays.seq_lens[first : first + count + 1] = [*lens, left]
        into.query_start_loc[first + 1 : first + 1 + count] = ends
        if sampling := [(end, row) for row, end in zip(extend, ends) if row.sample]:
            lines = slice(decoding, decoding + len(sampling))
            into.sample_at[lines] = [end - 1 for end, _ in sampling]
            into.sample_rows[lines] = [row.row for _, row in sampling]
            arrays.output_indices[lines] = [row.output_index for _, row in sampling]
        _fill(into.recurrent, self._recurrent([*extend, ExtendRow(0, 0, range(left), 0, False)]))

    @property
    def _prompts(self) -> PromptArrays[np.ndarray]:
        assert self.arrays.prompts is not None
        return self.arrays.prompts

    def _recurrent(self, extend: Sequence[ExtendRow]) -> RecurrentArrays[list[int]]:
        if self._saves is StateSaves.SECOND_PASS:
            return RecurrentArrays(passes=_pass_lists(extend, self._bucket, self._sizes))
        return one_pass_lists(extend, self._sizes)


def _fill(into: Record, values: Record) -> None:
    """Copies lists to the starts of arrays. None: keeps the padding."""
    for part, value in zip(into, values):
        if isinstance(value, tuple):
            _fill(part, value)
        elif value is not None:
            part[: len(value)] = value


def _padding(
    bucket: Bucket, sizes: Sequence[int], saves: StateSaves, seq_len_fill: int, groups: int, mrope: bool
) -> StepArrays[np.ndarray]:
    """Positions are 0: rotary tables end with the longest request."""
    (rows, tokens), prompts = bucket, bucket.prompts
    sampled, batch = rows + prompts, rows + prompts + 1
    sampling = SamplingArrays(_zeros(prompts, 2), _zeros(prompts, SamplingTable.CONSTANTS))
    admissions = AdmissionArrays(_zeros(prompts), _zeros(prompts), _zeros(prompts), sampling)
    pages = PageEntries(_zeros(bucket.entries), _zeros(bucket.entries), _zeros(bucket.entries, groups))
    starts = np.minimum(np.arange(batch + 1, dtype=np.int32), rows)
    starts[rows + 1 :] += tokens
    recurrent = (
        _padding_passes(bucket, sizes) if saves is StateSaves.SECOND_PASS else _padding_rows(bucket, sizes, saves)
    )
    return StepArrays(
        _zeros(batch),
        np.where(np.arange(batch) < rows, seq_len_fill, 0).astype(np.int32),
        _zeros(sampled),
        np.full((rows, groups), -1, np.int32),
        prompts=PromptArrays(
            starts,
            _zeros(sampled),
            _zeros(sampled),
            _zeros(tokens),
            _zeros(tokens),
            _zeros(tokens),
            None,
            recurrent,
            mrope=_zeros(tokens) if mrope else None,
        ),
        tables=TableChanges(admissions, pages, None),
    )


def _padding_rows(bucket: Bucket, sizes: Sequence[int], saves: StateSaves) -> RecurrentArrays[np.ndarray]:
    rows = bucket.prompts + 1
    counts = [most_chunks(rows, bucket.tokens, size) + saves.most * bucket.prompts for size in sizes]
    saved = None
    if saves is StateSaves.AT_CHUNKS:
        slots, lengths = _zeros(rows, SAVES_PER_PROMPT), _zeros(rows, SAVES_PER_PROMPT)
        saved = SavedArrays(slots, lengths, tuple(_zeros(count) for count in counts))
    return RecurrentArrays(_zeros(rows), tuple(_padding_chunks(rows, n, bucket.tokens) for n in counts), saved)


def _padding_passes(bucket: Bucket, sizes: Sequence[int]) -> RecurrentArrays[np.ndarray]:
    """Two passes without tokens. In the first one a prompt that saves a state has two runs."""
    rows = bucket.prompts + 1
    first = _padding_pass(2 * bucket.prompts + 1, bucket.tokens, sizes, covers_all=True)
    return RecurrentArrays(passes=(first, _padding_pass(rows, bucket.tail, sizes, covers_all=False)))


def _padding_pass(runs: int, tokens: int, sizes: Sequence[int], *, covers_all: bool) -> PassArrays[np.ndarray]:
    """`covers_all`: the pass has all tokens of its segment and needs no list of them."""
    return PassArrays(
        rows=_zeros(runs),
        read_state_slots=_zeros(runs),
        write_state_slots=_zeros(runs),
        query_start_loc=_zeros(runs + 1),
        start_positions=_zeros(runs),
        tokens=None if covers_all else _zeros(tokens),
        chunks=tuple(_padding_chunks(runs, most_chunks(runs, tokens, size), tokens) for size in sizes),
    )


def _padding_chunks(rows: int, count: int, tokens: int) -> ChunkArrays[np.ndarray]:
    ends = np.full(count + 1, tokens, np.int32)
    ends[0] = 0
    return ChunkArrays(ends, _zeros(count), _zeros(rows), np.full(rows, -1, np.int32))


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def _pass_lists(
    extend: Sequence[ExtendRow], bucket: Bucket, sizes: Sequence[int]
) -> tuple[PassArrays[list[int]], PassArrays[list[int]]]:
    """The two passes over a bucket's prompts and the padding row, filled up with runs without
    tokens.

    Example: a bucket of 2 prompts and 12 tokens, and one prompt of 5 that saves its state after 3.

        first pass:  tokens 0-2 of the prompt (saved), 3-4 (slots -1), 5-11 of the padding row, two
            empty runs
        second pass: tokens 3-4 of the prompt from the saved state, then padding up to the tail
    """
    first_pass, second_pass = runs_of(extend, 0), runs_of(extend, 1)
    padding_row, tail = bucket.prompts, sum([run.length for run in second_pass])
    first_pass += [Run(row, 0, 0, 0, bucket.tokens, 0) for row in range(len(extend), bucket.prompts + 1)]
    first_pass += [Run(padding_row, -1, -1, 0, bucket.tokens, 0)] * (2 * bucket.prompts + 1 - len(first_pass))
    second_pass.append(Run(padding_row, -1, -1, 0, 0, bucket.tail - tail))
    second_pass += [Run(padding_row, -1, -1, 0, 0, 0)] * (bucket.prompts + 1 - len(second_pass))
    later = pass_lists(second_pass, 1, sizes)
    assert later.tokens is not None
    # The list of tokens keeps its padding, 0: no second pass computes token 0, which is before any saved state.
    del later.tokens[tail:]
    return pass_lists(first_pass, 0, sizes), later
