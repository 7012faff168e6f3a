"""One step as data: the scheduler's plan for an executor, and its result.

Host data only: integers, sampling parameters, and the patches of images that are to be encoded. Encoded as arrays: a
plan goes to every rank in every step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from zlib import crc32

import msgspec
import numpy as np

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import EncoderInput
from hybridrt.kernels.core.slots import OWN_SLOT
from hybridrt.kernels.sampling.token_rules import TokenRules
from hybridrt.mem_cache.pools.state_moves import StateMove
from hybridrt.runtime.step.token_scores import TokenScores

NO_INTEGERS = np.empty(0, np.int32)


class Admission(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """A request gets a row. Before the rest of the step, the executor zeroes the state in the slot,
    resets the row's ring and stores the row's sampling constants.

    Attributes:
        row: request row in [1, R]; row 0 is padding.
        state_slot: in [1, S]; NO_SLOT if the model has no recurrent layer.
        prompt_len: tokens of the prompt.
        seed: seed of the request's draws.
        phase: in [0, 2**31), spreads the folds of requests that advance alike (`MambaPool.admit_rows`).
        rules: what `params` allow of single tokens; None for all.
        counted: [n] int32 distinct tokens of the prompt, for penalties; empty if there are none.
        output: [n] int32 tokens generated so far, for penalties and rules; empty if there are none.
            A retracted request has some.
        mrope_delta: position of a generated token, less its index. Not 0 after a prompt with spans,
            in a model with positions on three axes.
    """

    row: int
    state_slot: int
    prompt_len: int
    params: SamplingParams
    seed: int
    phase: int
    rules: TokenRules | None = None
    counted: np.ndarray = NO_INTEGERS
    output: np.ndarray = NO_INTEGERS
    mrope_delta: int = 0

    @classmethod
    def from_prompt(
        cls, row: int, state_slot: int, prompt: Sequence[int], params: SamplingParams, seed: int,
        rules: TokenRules | None = None, output: Sequence[int] = (), mrope_delta: int = 0,
    ) -> "Admission":  # fmt: skip
        """The admission of a request, with only the tokens that the executor needs."""
        penalties = params.uses_penalties
        counted = int32s(set(prompt)) if penalties else NO_INTEGERS
        known = int32s(output) if penalties or rules is not None else NO_INTEGERS
        phase = fold_phase(prompt, params, seed)
        return cls(row, state_slot, len(prompt), params, seed, phase, rules, counted, known, mrope_delta)


def fold_phase(prompt: Sequence[int], params: SamplingParams, seed: int) -> int:
    """The `phase` of an admission: from the end of its prompt and, if it draws, its seed. It
    depends on the request alone, so that neighbours do not change where its state is rounded."""
    end = np.array(prompt[-64:], np.int32)
    return crc32(end.tobytes(), 0 if params.greedy else seed & 0xFFFFFFFF) >> 1


class PageWrite(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """`pages` [n, G] int32, one of each page group, become pages first_page, first_page + 1, ... of
    `row`'s KV. Page 0: the row has none there, and reads none."""

    row: int
    first_page: int
    pages: np.ndarray


class PageCopy(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """In each page group, the KV of its page in `sources` [G] int32 is copied to its page in
    `targets` [G]."""

    sources: np.ndarray
    targets: np.ndarray


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """State and KV of the first `length` tokens of `row`, between the pools and byte `offset` of
    the executor's arena (hybridrt.runtime.run.state_arena).

    Attributes:
        room: bytes of the arena that belong to this copy; None: all from `offset` on.
        start: first tokens without their KV in layers that have no window.
    """

    row: int
    length: int
    offset: int
    room: int | None = None
    start: int = 0


class HostState(NamedTuple):
    """A state after `length` tokens, in state slot `slot` of the device and place `place` of the
    tier."""

    length: int
    slot: int
    place: int


class HostCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy of cached KV pages and states to the tier in main memory; with `fetch`, to the device.

    Attributes:
        ticket: greater than that of every earlier copy.
        pages, host_pages: of each page group: page pages[g][i] of the pool and page
            host_pages[g][i] of the tier.
        cleared: slabs of the pool that are zeroed first.
    """

    ticket: int
    fetch: bool
    pages: Sequence[Sequence[int]] = ()
    host_pages: Sequence[Sequence[int]] = ()
    states: Sequence[HostState] = ()
    cleared: Sequence[int] = ()


class DecodeRow(NamedTuple):
    """One of `DecodeRows`: the same fields, of one row."""

    row: int
    computed: int
    output_index: int
    drafts: Sequence[int] = ()
    predecessors: Sequence[int] | None = None


class DecodeRows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """The decode rows of a step as columns, [n] int32 unless said otherwise. A row's input is the
    last token sampled for it, which only the device may know yet.

    Attributes:
        rows: request rows.
        computed: tokens whose KV and state are written before this step: the input's position.
        output_indices: index, in the request's output, of the token sampled here; with the seed it
            keys the draw.
        num_drafts: proposed tokens to verify after the input (speculative decoding).
        drafts: [sum(num_drafts)] int32, row after row.
        predecessors: None if each draft follows the token before it; else [sum(num_drafts)] int32,
            the index of the token that it follows among (input, *drafts) of its row.

    Raises:
        ValueError: the columns do not belong together.
    """

    rows: np.ndarray = NO_INTEGERS
    computed: np.ndarray = NO_INTEGERS
    output_indices: np.ndarray = NO_INTEGERS
    num_drafts: np.ndarray = NO_INTEGERS
    drafts: np.ndarray = NO_INTEGERS
    predecessors: np.ndarray | None = None

    def __post_init__(self) -> None:
        n, total = len(self.rows), int(self.num_drafts.sum()) if len(self.drafts) else np.count_nonzero(self.num_drafts)
        if not n == len(self.computed) == len(self.output_indices) == len(self.num_drafts):
            lengths = len(self.computed), len(self.output_indices), len(self.num_drafts)
            raise ValueError(f"{n} decode rows with columns of {lengths}; each column has an entry a row")
        if len(self.drafts) != total or (self.predecessors is not None and len(self.predecessors) != total):
            given = None if self.predecessors is None else len(self.predecessors)
            raise ValueError(f"{len(self.drafts)} drafts and {given} predecessors; num_drafts counts {total} of each")

    @classmethod
    def from_rows(cls, rows: Iterable[DecodeRow]) -> "DecodeRows":
        rows = list(rows)
        lines, computed = int32s(r.row for r in rows), int32s(r.computed for r in rows)
        indices = int32s(r.output_index for r in rows)
        return cls.with_drafts(lines, computed, indices, [r.drafts for r in rows], [r.predecessors for r in rows])

    @classmethod
    def with_drafts(
        cls, rows: np.ndarray, computed: np.ndarray, output_indices: np.ndarray, drafts: Sequence[Sequence[int]],
        predecessors: Sequence[Sequence[int] | None],
    ) -> "DecodeRows":  # fmt: skip
        """Columns, and each row's drafts and their predecessors."""
        flat = None
        if any(p is not None for p in predecessors):
            flat = int32s(i for d, p in zip(drafts, predecessors) for i in (range(len(d)) if p is None else p))
        counts, tokens = int32s(map(len, drafts)), int32s(token for d in drafts for token in d)
        return cls(rows, computed, output_indices, counts, tokens, flat)

    def __len__(self) -> int:
        return len(self.rows)


NO_ROWS = DecodeRows()


def int32s(values: Iterable[int]) -> np.ndarray:
    """[n] int32."""
    return np.fromiter(values, np.int32)


class EncoderTask(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """The embeddings of a span go to `rows` [n] int32 of the device's embedding cache.

    Attributes:
        ticket: greater than that of every earlier task.
        host_rows: [n] int32 rows of the cache in main memory that get them too; empty: none do.
    """

    ticket: int
    input: EncoderInput
    rows: np.ndarray
    host_rows: np.ndarray = NO_INTEGERS


class EmbeddingFetch(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Embeddings in rows `host_rows` [n] int32 of main memory go to `rows` [n] int32 of the device's
    embedding cache. The task that made them has ended."""

    host_rows: np.ndarray
    rows: np.ndarray


class SpanRows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Tokens of a chunk that take their embeddings from the device's embedding cache: [n] int32
    places within the chunk, and [n] int32 rows of the cache."""

    places: np.ndarray
    rows: np.ndarray


class ExtendRow(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a prompt, or, after a retraction, of a prompt and the output that it had. `sample` is set on the last
    chunk, and its last position gives the next token; on others `following` is the prompt's next token.

    Attributes:
        row: of the request.
        computed: tokens of the request before the chunk.
        tokens: token ids of the chunk.
        output_index: the number, in the output, of the token that is sampled.
        read_state_slot: the state before the chunk, of a cached prefix, or OWN_SLOT. The state
            after the chunk goes to the row's own slot.
        saves: (number of tokens, slot), in order: the state after so many of the chunk's tokens, 1
            to len(tokens) - 1, is saved in this slot.
        embeddings: tokens that do not take theirs from the table; None: all do.
        mrope: [3, n] int32 positions in time, rows and columns, three equal ones without
            `embeddings`; None: they are those of the tokens in the prompt.
    """

    row: int
    computed: int
    tokens: Sequence[int]
    output_index: int
    sample: bool
    following: int = 0
    read_state_slot: int = OWN_SLOT
    saves: Sequence[tuple[int, int]] = ()
    embeddings: SpanRows | None = None
    mrope: np.ndarray | None = None


@dataclass(slots=True)
class StepPlan:
    """One step. The batch has the decode rows, then the extend rows, in order.

    Attributes:
        imports, exports: states of extend rows: copied in before the rows are computed, and out
            afterwards.
        page_copies: made before the rows are computed. No page is both a source and a target.
        moves: moves of states to slots of the prefix cache: first those of rows that donate their
            slots, then snapshots of decode rows before the step (`StateMove.when`). No slot is the
            target of two moves at one time.
        host_copies: launched after the donations, on a separate stream. A step waits for them only
            through `after_copies`.
        after_copies: this step and later ones wait for the copies up to this ticket; 0: for none.
        cleared: slabs that are zeroed after that wait, before snapshots and rows.
        fetch: embeddings that come from main memory, before any task of the encoder runs.
        encode: new tasks of the encoder, which run in order, before the rows. A step with decode rows
            runs only a part of the tasks that are left, and later steps run the rest.
        after_encoder: the tasks up to this ticket end before the rows; 0: none need to.
        constrained: the rows that sample under a bitmask, by their numbers in the step's result. If
            there are any, `launch` launches all but the sampling, which `StepHandle.sample`
            launches.
        eager: no graph runs the extend rows.
    """

    admissions: list[Admission] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    decode: DecodeRows = NO_ROWS
    extend: list[ExtendRow] = field(default_factory=list)
    imports: list[StateCopy] = field(default_factory=list)
    exports: list[StateCopy] = field(default_factory=list)
    moves: list[StateMove] = field(default_factory=list)
    page_copies: list[PageCopy] = field(default_factory=list)
    host_copies: list[HostCopy] = field(default_factory=list)
    after_copies: int = 0
    cleared: list[int] = field(default_factory=list)
    fetch: list[EmbeddingFetch] = field(default_factory=list)
    encode: list[EncoderTask] = field(default_factory=list)
    after_encoder: int = 0
    constrained: list[int] = field(default_factory=list)
    eager: bool = False

    @property
    def runs_eagerly(self) -> bool:
        """Whether no graph of prompts runs it, whatever its size: the scheduler said so, it verifies drafts, takes
        embeddings of images, or copies states of other workers between the table changes and the model."""
        drafts = len(self.decode.drafts) > 0
        embeds = any(row.embeddings is not None for row in self.extend)
        return self.eager or drafts or embeds or bool(self.imports or self.exports)


# Natural logarithms: the token's own first, then the likeliest.
TokenLogprobs = dict[int, float]


@dataclass(slots=True)
class StepResult:
    """For every decode row, then every extend row with `sample` set: the tokens that it gained, in
    order (one without speculation, accepted drafts + 1 with it), and their log-probabilities where
    asked for (else None).

    Attributes:
        prompt_logprobs: scores by request row, for each extend row of a request with
            `prompt_logprobs`: those of the prompt tokens that follow the chunk's tokens, in order.
        pooled: sums of hidden states [hidden] float32 by request row, for chunks of requests with
            `pooling`.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]
    prompt_logprobs: dict[int, TokenScores] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)


class StepHandle(Protocol):
    """A launched step, perhaps still running."""

    @property
    def needs_masks(self) -> bool:
        """The step has `constrained` rows and has not sampled. No other step can be launched before
        `sample` or `drop`."""

    def sample(self, masks: np.ndarray) -> None:
        """Launches the sampling of a step that needs masks.

        Args:
            masks: [lines, ceil(vocab / 32)] int32, bit i % 32 of word i // 32 set where token i is
                allowed: for each constrained row in order one line for its last token, then one for
                each of its drafts.

        Raises:
            EngineError: the step needs no masks, or these have another shape. Nothing has changed.
        """

    def drop(self) -> None:
        """Gives up a step that needs masks: it never samples. Ignored by other steps."""

    def ready(self) -> bool:
        """True if `result` would not wait."""

    def result(self) -> StepResult:
        """Waits for the step's tokens and returns them. Call this in launch order. A step that
        samples nothing is not waited for: later work is queued on the same stream.

        Raises:
            EngineError: the step needs masks, or was dropped.
        """


class Executor(Protocol):
    """Runs steps in launch order. A step may be launched before the result of an earlier one is
    read."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Returns at once.

        Raises:
            EngineError: the last step needs masks: sample or drop it first. Nothing has changed.
        """

    def drop_last(self) -> None:
        """Gives up the step launched last if it needs masks: for a caller that has lost its handle."""

    def copied(self, ticket: int) -> bool:
        """Whether a host copy of a launched plan has ended."""

    def encoded(self, ticket: int) -> bool:
        """Whether the embeddings of an encoder task of a launched plan can be read."""
