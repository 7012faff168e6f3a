"""One step as data: what the scheduler hands to an executor, and what comes back. Host integers only.

The parts of a plan are msgspec structs, which are encoded as arrays: a plan goes to every rank in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

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


class DecodeRow(msgspec.Struct, frozen=True, array_like=True):
    """One decode token. Its input is the last token sampled for the row, which only the device may know yet.

    Attributes:
        computed: tokens whose KV and state are written before this step: the input's position.
        output_index: index, in the request's output, of the token sampled here; with the seed it keys the draw.
        drafts: proposed continuations to verify after the input (speculative decoding).
        parents: None for a chain; of a tree, the index of each draft's parent among (input, *drafts), parents first.
    """

    row: int
    computed: int
    output_index: int
    drafts: Sequence[int] = ()
    parents: Sequence[int] | None = None


class ExtendRow(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a prompt. `sample` is set on the last chunk, whose last position gives the next token; on the others
    `following` is the prompt's next token.

    Attributes:
        read_slot: the state slot that holds the state before the chunk, of a prefix that is cached; 0: the row's own.
            The state behind the chunk goes to the row's own slot.
    """

    row: int
    computed: int
    tokens: Sequence[int]
    output_index: int
    sample: bool
    following: int = 0
    read_slot: int = 0


@dataclass(slots=True)
class StepPlan:
    """Decode rows come first in the batch, then extend rows, each list in order. What `imports` says is copied in
    before the rows are computed, what `exports` says is copied out afterwards; both name extend rows. Before anything
    else, admissions included, each row in `donations` parts with its slot, which holds the row's whole state from then
    on."""

    admissions: list[Admission] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    extend: list[ExtendRow] = field(default_factory=list)
    imports: list[StateCopy] = field(default_factory=list)
    exports: list[StateCopy] = field(default_factory=list)
    donations: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[DecodeRow | ExtendRow]:
        """All rows in batch order."""
        return [*self.decode, *self.extend]

    @property
    def sampled(self) -> list[DecodeRow | ExtendRow]:
        """The rows that a result has tokens for, in its order."""
        return [*self.decode, *(row for row in self.extend if row.sample)]


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
