"""From hidden states to results: what each row needs, draws, and the verification of drafts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrt.base.sampling_params import MAX_LOGPROBS, SamplingParams
from hybridrt.kernels.sampling.acceptance import accept
from hybridrt.kernels.sampling.sampling import LogitFilters, Penalties, greedy, sample
from hybridrt.kernels.sampling.token_rules import DrawLines, apply_token_rules
from hybridrt.runtime.step.pack import ScoredTokens
from hybridrt.runtime.step.plan import Admission, ExtendRow
from hybridrt.runtime.step.sampling_table import FLOATS, SamplingTable

# Every set has kernels of its own.
_FILTERS = {"top_k": 20, "top_p": 0.9, "min_p": 0.05}
_FILTER_SETS = [dict(some) for count in range(4) for some in combinations(_FILTERS.items(), count)]
EVERY_DRAW: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    *({"temperature": 0.7, **filters} for filters in _FILTER_SETS),
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 0.0, "logit_bias": {0: 1.0}},
    {"temperature": 0.7, "logit_bias": {0: 1.0}},
    {"temperature": 0.7, "logit_bias": {0: 1.0}, "presence_penalty": 0.1},
)

# Bits on the host: a step runs only what its requests use. WORDS: rules depend on earlier tokens,
# which are then kept.
DRAWS, TOP_K, TOP_P, MIN_P, PENALTIES, LOGPROBS, RULES, WORDS = (1 << i for i in range(8))


def used_parts(params: Iterable[SamplingParams]) -> int:
    """The parts of sampling that any of the requests uses."""
    return reduce(or_, map(_parts, params), 0)


def _parts(params: SamplingParams) -> int:
    return (
        DRAWS * (not params.greedy)
        | TOP_K * (params.top_k > 0)
        | TOP_P * (params.top_p < 1)
        | MIN_P * (params.min_p > 0)
        | PENALTIES * params.uses_penalties
        | LOGPROBS * (params.logprobs is not None)
        | RULES * params.uses_rules
        | WORDS * bool(params.bad_words)
    )


def takes_likeliest(parts: int) -> bool:
    """Whether tokens are the likeliest of the model's own logits, and none is noted for later draws."""
    return not parts & (DRAWS | PENALTIES | RULES)


class RowRequirements:
    """The parts of sampling that each request row uses, on the host."""

    def __init__(self, num_rows: int) -> None:
        self._parts = np.zeros(num_rows + 1, np.uint8)
        self._logprobs = np.full(num_rows + 1, -1, np.int64)
        self._scored_ids: dict[int, Sequence[int]] = {}
        self._ruled_until = np.zeros(num_rows + 1, np.int64)

    def note_admissions(self, admissions: Iterable[Admission]) -> None:
        """Stores what the requests that get rows need, in place of what the rows needed before."""
        for a in admissions:
            self._ruled_until[a.row] = 0 if a.rules is None else a.rules.until
            self._parts[a.row] = _parts(a.params)
            ids = a.params.logprob_token_ids
            self._logprobs[a.row] = -1 if a.params.logprobs is None else a.params.logprobs if ids is None else 0
            self._scored_ids.pop(a.row, None)
            if ids is not None:
                self._scored_ids[a.row] = ids

    def required_by_rows(self, rows: np.ndarray, output_indices: np.ndarray) -> tuple[int, Sequence[int | None]]:
        """What rows [n] need for tokens from those output indices [n] on.

        Returns:
            The parts of sampling that any of them uses; and how many alternatives each row wants,
                None for no log-probabilities, or empty if no row wants any. Those that `scored_ids`
                gives are not counted.
        """
        parts = reduce(or_, set(self._parts.take(rows).tobytes()), 0)
        if parts & RULES and not (output_indices < self._ruled_until[rows]).any():
            parts &= ~RULES
        if not parts & LOGPROBS:
            return parts, ()
        return parts, [None if n < 0 else n for n in self._logprobs[rows].tolist()]

    def scored_ids(self, rows: np.ndarray) -> Sequence[Sequence[int]]:
        """The tokens that each row has named, whose log-probabilities it gets. Empty if no row has."""
        found = [self._scored_ids.get(row, ()) for row in rows.tolist()] if self._scored_ids else []
        return found if any(found) else ()


class SampledLines(NamedTuple):
    """The input of sampling: the decode rows, then the prompts that end, m lines in all.

    Attributes:
        rows, output_indices: [m] int32; on_host: copies on the host.
        logits: [m, vocab].
    """

    rows: Tensor
    output_indices: Tensor
    on_host: tuple[np.ndarray, np.ndarray]
    logits: Tensor


@dataclass(frozen=True)
class Verification:
    """n rows of T inputs to verify, on the device.

    Attributes:
        rows, output_indices: [n] int32 request rows, and the index of the token drawn after the
            root.
        positions: [n, T] int32 of all inputs: a draw's output index grows with its position.
        drafts: [n, T - 1] int32; the first num_drafts [n] int32 are drafts, the rest is padding.
        last_tokens: [R + 1] int32, which gets each row's next root.
        predecessors, mask: those of SpecInfo.
    """

    rows: Tensor
    output_indices: Tensor
    positions: Tensor
    drafts: Tensor
    num_drafts: Tensor
    last_tokens: Tensor
    predecessors: Tensor | None = None
    mask: Tensor | None = None

    def earlier(self) -> tuple[Tensor, Tensor]:
        """For the draw after each input, [n * T, T - 1] each: all drafts of its row, int64, and
        whether the input sees them, int32."""
        n, width = self.positions.shape
        sees = self.mask
        if sees is None:
            sees = torch.ones(width, width, dtype=torch.bool, device=self.drafts.device).tril().expand(n, -1, -1)
        drafts = self.drafts[:, None].expand(-1, width, -1)
        return drafts.reshape(n * width, -1).long(), sees[:, :, 1:].reshape(n * width, -1).int()

    def keys(self) -> tuple[Tensor, Tensor]:
        """Rows and output indices of the draws after all inputs, [n * T] int32 each."""
        n, width = self.positions.shape
        indices = self.output_indices[:, None] + self.positions - self.positions[:, :1]
        return self.rows.repeat_interleave(width, output_size=n * width), indices.view(-1)

    def known(self) -> Tensor:
        """[n * T] int32: the output index of the first draft before each draw."""
        return self.output_indices[:, None].expand(self.positions.shape).reshape(-1)

    def paths(self) -> Tensor:
        """[n * T, T - 1] int32: the drafts that each input sees, by depth; later entries are
        undefined."""
        n, width = self.positions.shape
        paths = self.drafts[:, None].expand(-1, width, -1)
        if self.mask is not None:
            depths = (self.positions[:, 1:] - self.positions[:, :1] - 1)[:, None]
            # Drafts outside the path go to a column that is cut off.
            places = torch.where(self.mask[:, :, 1:], depths, width - 1).long()
            paths = paths.new_zeros(n, width, width).scatter_(2, places, paths)[:, :, :-1]
        return paths.reshape(n * width, -1)


@dataclass(frozen=True)
class Accepted:
    """What n rows of a verify step keep.

    Attributes:
        tokens: [n, T] int64 drawn after the inputs that stay, in order; the first `counts` of a row
            are its output, the last of them -1 if its logits were not finite.
        counts: [n] int32 inputs that stay, the root included.
        path: [n, T] int64 places of the inputs that stay, the root first; None: the first ones.
    """

    tokens: Tensor
    counts: Tensor
    path: Tensor | None = None

    def ends(self) -> Tensor:
        """[n] int64: each row's last input that stays, counted over all rows of the step."""
        n, width = self.tokens.shape
        return torch.arange(n, device=self.tokens.device) * width + self.counts - 1


class Sampler:
    """Picks one token a row; a draw depends on the request's seed and the output index alone."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table
        self._greedy = greedy.for_device(table.seeds.device)

    def __call__(
        self, logits: Tensor, rows: Tensor, output_indices: Tensor, parts: int, bitmask: Tensor | None = None
    ) -> Tensor:
        """logits [n, vocab], rows and output_indices [n] int32 to tokens [n] int64; -1 where logits are not finite, or
        no token is allowed.

        Args:
            parts: parts of sampling that any row uses (`used_parts`).
            bitmask: the tokens that grammars allow (see LogitFilters); None allows all.
        """
        if parts & RULES:
            lines = DrawLines(rows, output_indices, output_indices, rows.new_empty(len(rows), 0))
            logits = apply_token_rules(logits, self.table.rules, lines)
        tokens = self._draw(logits, rows, output_indices, parts, bitmask=bitmask)
        if parts & PENALTIES:
            self.table.count(rows, tokens)
        if parts & WORDS:
            self.table.remember(rows, output_indices, tokens)
        return tokens

    def verify(self, logits: Tensor, step: Verification, parts: int, bitmask: Tensor | None = None) -> Accepted:
        """Draws after each of the T inputs of n rows, and accepts inputs
        (hybridrt.kernels.sampling.acceptance).

        Args:
            logits: [n * T, vocab].
            bitmask: [n * T, ceil(vocab / 32)] as for `__call__`.
        """
        if takes_likeliest(parts):
            tokens = self._greedy(logits, bitmask)
        else:
            rows, indices = step.keys()
            if parts & RULES:
                lines = DrawLines(rows, indices, step.known(), step.paths())
                logits = apply_token_rules(logits, self.table.rules, lines)
            earlier = step.earlier() if parts & PENALTIES else None
            tokens = self._draw(logits, rows, indices, parts, earlier, bitmask)
        drawn = tokens.view(step.positions.shape)
        relations = step.predecessors, step.mask
        kept = Accepted(*accept(drawn, step.drafts, step.num_drafts, step.rows, step.last_tokens, *relations))
        if parts & (PENALTIES | WORDS):
            self._take(step, kept, parts)
        return kept

    def _take(self, step: Verification, kept: Accepted, parts: int) -> None:
        """Notes the tokens that stay, for penalties and rules. The others are noted in row 0, which is scratch."""
        places = torch.arange(kept.tokens.shape[1], device=kept.tokens.device)
        rows = step.rows[:, None].masked_fill(places >= kept.counts[:, None], 0).view(-1)
        if parts & PENALTIES:
            self.table.count(rows, kept.tokens.view(-1))
        if parts & WORDS:
            self.table.remember(rows, (step.output_indices[:, None] + places).view(-1), kept.tokens.view(-1))

    def draft(self, logits: Tensor, rows: Tensor, output_indices: Tensor, parts: int, drafted: Tensor) -> Tensor:
        """Draws as `__call__` does, after drafts `drafted` [n, k] int64. None of them is counted."""
        if parts & RULES:
            lines = DrawLines(rows, output_indices, output_indices - drafted.shape[1], drafted.int())
            logits = apply_token_rules(logits, self.table.rules, lines)
        counted = parts & PENALTIES
        earlier = (drafted.clamp(min=0), torch.ones_like(drafted, dtype=torch.int32)) if counted else None
        return self._draw(logits, rows, output_indices, parts, earlier)

    def _draw(
        self, logits: Tensor, rows: Tensor, output_indices: Tensor, parts: int,
        earlier: tuple[Tensor, Tensor] | None = None, bitmask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`earlier`: tokens before each draw that are not counted yet, [n, k] int64, and how often
        each counts, [n, k] int32.
        """
        if not parts & (DRAWS | PENALTIES):  # the likeliest token of logits that only rules change
            return self._greedy(logits, bitmask)
        table, penalties = self.table, None
        constants = dict(zip(FLOATS, table.floats.index_select(1, rows)))
        if parts & PENALTIES:
            counts = table.output_counts[rows]
            if earlier is not None:
                counts.scatter_add_(1, *earlier)
            penalties = Penalties(
                constants["repetition_penalty"], constants["presence_penalty"], constants["frequency_penalty"],
                counts, table.prompt_mask[rows],
            )  # fmt: skip
        logit_filters = LogitFilters(
            constants["temperature"],
            top_k=table.top_k[rows] if parts & TOP_K else None,
            top_p=constants["top_p"] if parts & TOP_P else None,
            min_p=constants["min_p"] if parts & MIN_P else None,
            penalties=penalties,
            bitmask=bitmask,
        )
        return sample(logits, logit_filters, table.seeds[rows], output_indices.long())


# Reading the head's weights does not dominate, and the logits are small compared with activations.
LINES = 128


def prompt_logprob_bytes(vocab_size: int, itemsize: int) -> int:
    """Most bytes on the device: logits, those of all ranks, two copies in float32, and the results."""
    return LINES * (vocab_size * (2 * itemsize + 8) + (MAX_LOGPROBS + 1) * 12)


class Wanted(NamedTuple):
    """The prompt tokens of a chunk that get log-probabilities, with `top` alternatives each."""

    row: int
    tokens: Sequence[int]
    top: int


class Pooled(NamedTuple):
    """The tokens `start` to `end` of a step's batch, whose hidden states are summed for a row."""

    row: int
    start: int
    end: int

    def sum(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [hidden] float32."""
        return torch.sum(hidden[self.start : self.end], 0, dtype=torch.float32)


class PromptRequirements:
    """The request rows that need log-probabilities of their prompts, or one vector of them, on the
    host."""

    def __init__(self) -> None:
        self._scored: dict[int, tuple[int, int]] = {}  # alternatives, and tokens of the prompt
        self._pooled: dict[int, tuple[str, int]] = {}  # kind, and tokens of the prompt

    def note_admissions(self, admissions: Sequence[Admission]) -> None:
        """Stores what the requests that get rows need, in place of what the rows needed before."""
        for a in admissions:
            self._scored.pop(a.row, None)
            self._pooled.pop(a.row, None)
            if a.params.prompt_logprobs is not None:
                self._scored[a.row] = a.params.prompt_logprobs, a.prompt_len
            if a.params.pooling is not None:
                self._pooled[a.row] = a.params.pooling, a.prompt_len

    def wanted_by_rows(
        self, extend: Sequence[ExtendRow], decoded: int
    ) -> tuple[list[Wanted], list[Pooled], ScoredTokens[np.ndarray] | None]:
        """The prompt tokens of a step's chunks that requests want log-probabilities or a vector of.

        Args:
            decoded: tokens of the decode rows before them.

        Returns:
            The tokens with log-probabilities, those with a vector, and the places of the former in
                the batch, for the step's record (None without any).
        """
        if not self._scored and not self._pooled:
            return [], [], None
        scored, places = self._scored_by_rows(extend, decoded)
        return scored, self._pooled_by_rows(extend, decoded), places

    def _scored_by_rows(
        self, extend: Sequence[ExtendRow], decoded: int
    ) -> tuple[list[Wanted], ScoredTokens[np.ndarray] | None]:
        wanted, places = list[Wanted](), list[np.ndarray]()
        for chunk in extend if self._scored else ():
            top, prompt_len = self._scored.get(chunk.row, (0, 0))
            count = min(len(chunk.tokens), prompt_len - 1 - chunk.computed)
            if count > 0:
                wanted.append(Wanted(chunk.row, [*chunk.tokens[1:], chunk.following][:count], top))
                places.append(np.arange(decoded, decoded + count, dtype=np.int32))
            decoded += len(chunk.tokens)
        if not wanted:
            return [], None
        tokens = np.array([token for each in wanted for token in each.tokens], np.int32)
        return wanted, ScoredTokens(np.concatenate(places), tokens)

    def _pooled_by_rows(self, extend: Sequence[ExtendRow], decoded: int) -> list[Pooled]:
        found = list[Pooled]()
        for chunk in extend if self._pooled else ():
            kind, prompt_len = self._pooled.get(chunk.row, ("", 0))
            count = min(len(chunk.tokens), prompt_len - chunk.computed)
            if kind == "mean" and count > 0:
                found.append(Pooled(chunk.row, decoded, decoded + count))
            elif kind == "last" and count > 0 and chunk.computed + count == prompt_len:
                found.append(Pooled(chunk.row, decoded + count - 1, decoded + count))
            decoded += len(chunk.tokens)
        return found
