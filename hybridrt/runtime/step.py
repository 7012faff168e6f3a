"""One step as data: what the scheduler hands to an executor, and what comes back. Host integers only.

The parts of a plan are msgspec structs, which are encoded as arrays: a plan goes to every rank in every step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from hybridrt.sampling_params import SamplingParams


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row. The executor zeroes the slot's state, resets the row's ring and stores the row's
    sampling constants on the device, before anything else of the step runs.

    Attributes:
        row: request row in [1, R]; row 0 is padding.
        slot: recurrent state slot in [1, S]; 0 if the model has no recurrent layer.
        tokens: prompt, then the tokens generated so far (a retracted request comes back with some).
        prompt_len: how many of `tokens` are the prompt.
        seed: of the request's draws.
    """

    row: int
    slot: int
    tokens: Sequence[int]
    prompt_len: int
    params: SamplingParams
    seed: int


class PageWrite(msgspec.Struct, frozen=True, array_like=True):
    """`pages` become pages first_page, first_page + 1, ... of `row`'s KV."""

    row: int
    first_page: int
    pages: Sequence[int]


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """State and KV of the first `length` tokens of `row`, between the pools and byte `offset` of the executor's arena
    (hybridrt.runtime.state_arena).

    Attributes:
        room: bytes of the arena that belong to this copy; None: all from `offset` on.
    """

    row: int
    length: int
    offset: int
    room: int | None = None


class DecodeRow(NamedTuple):
    """One of `DecodeRows`: the same fields, of one row."""

    row: int
    computed: int
    output_index: int
    drafts: Sequence[int] = ()
    parents: Sequence[int] | None = None


def no_integers() -> np.ndarray:
    """[0] int32."""
    return np.empty(0, np.int32)


class DecodeRows(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """The decode rows of a step as columns, [n] int32 unless said otherwise. The input of a row is the last token
    sampled for it, which only the device may know yet.

    Attributes:
        rows: request rows.
        computed: tokens whose KV and state are written before this step: the input's position.
        output_indices: index, in the request's output, of the token sampled here; with the seed it keys the draw.
        num_drafts: proposed tokens to verify after the input (speculative decoding).
        drafts: [sum(num_drafts)] int32, row after row.
        parents: None if all drafts are chains; else [sum(num_drafts)] int32, the index of each draft's parent among
            (input, *drafts) of its row, parents first.

    Raises:
        ValueError: the columns do not belong together.
    """

    rows: np.ndarray = msgspec.field(default_factory=no_integers)
    computed: np.ndarray = msgspec.field(default_factory=no_integers)
    output_indices: np.ndarray = msgspec.field(default_factory=no_integers)
    num_drafts: np.ndarray = msgspec.field(default_factory=no_integers)
    drafts: np.ndarray = msgspec.field(default_factory=no_integers)
    parents: np.ndarray | None = None

    def __post_init__(self) -> None:
        n, total = len(self.rows), int(self.num_drafts.sum())
        if not n == len(self.computed) == len(self.output_indices) == len(self.num_drafts):
            raise ValueError(f"columns of {n} decode rows differ in length")
        if len(self.drafts) != total or (self.parents is not None and len(self.parents) != total):
            raise ValueError(f"{len(self.drafts)} drafts where num_drafts counts {total}")

    @classmethod
    def of(cls, rows: Iterable[DecodeRow]) -> "DecodeRows":
        """The columns of single rows."""
        rows, parents = list(rows), None
        if any(r.parents is not None for r in rows):
            parents = int32s(p for r in rows for p in (range(len(r.drafts)) if r.parents is None else r.parents))
        return cls(
            rows=int32s(r.row for r in rows),
            computed=int32s(r.computed for r in rows),
            output_indices=int32s(r.output_index for r in rows),
            num_drafts=int32s(len(r.drafts) for r in rows),
            drafts=int32s(token for r in rows for token in r.drafts),
            parents=parents,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DecodeRow]:
        """Row by row, as Python integers."""
        end = 0
        columns = (self.rows, self.computed, self.output_indices, self.num_drafts)
        drafts, parents = self.drafts.tolist(), None if self.parents is None else self.parents.tolist()
        for row, computed, index, count in zip(*(column.tolist() for column in columns)):
            start, end = end, end + count
            yield DecodeRow(row, computed, index, drafts[start:end], parents and parents[start:end])


def int32s(values: Iterable[int]) -> np.ndarray:
    """[n] int32."""
    return np.fromiter(values, np.int32)


class ExtendRow(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a prompt. `sample` is set on the last chunk, whose last position gives the next token; on the others
    `following` is the prompt's next token."""

    row: int
    computed: int
    tokens: Sequence[int]
    output_index: int
    sample: bool
    following: int = 0


@dataclass(slots=True)
class StepPlan:
    """Decode rows come first in the batch, then extend rows, each list in order. What `imports` says is copied in
    before the rows are computed, what `exports` says is copied out afterwards; both name extend rows."""

    admissions: list[Admission] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    decode: DecodeRows = field(default_factory=DecodeRows)
    extend: list[ExtendRow] = field(default_factory=list)
    imports: list[StateCopy] = field(default_factory=list)
    exports: list[StateCopy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one sampled token (natural log, before temperature) and of the most likely ones."""

    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class StepResult:
    """For every decode row, then every extend row with `sample` set: the tokens that it gained, in order (one
    without speculation, accepted drafts + 1 with it), and their log-probabilities where asked for (else None)."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None]


class StepHandle(Protocol):
    """A launched step whose result may still be on its way."""

    def ready(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self) -> StepResult:
        """Waits for the step and returns its tokens. Steps are consumed in launch order."""
        ...


class Executor(Protocol):
    """Runs steps in launch order. `launch` returns at once; a later step may be launched before the result is read."""

    def launch(self, plan: StepPlan) -> StepHandle: ...
