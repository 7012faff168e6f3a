"""From logits to tokens: per-row constants that live on the device, and the greedy or sampled tail of a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from struct import Struct

import numpy as np
import torch

from hybridrt.kernels.acceptance import accept_chain, accept_tree
from hybridrt.kernels.sampling import LogitFilters, Penalties, greedy, sample
from hybridrt.runtime.step import Admission
from hybridrt.runtime.token_rules import TokenRules, num_biases
from hybridrt.sampling_params import SamplingParams

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("top_k", "num_biases", "restricted")
_CONSTANTS = Struct(f"=q{len(FLOATS)}f{len(INTEGERS)}i")

_DRAWS, _TOP_K, _TOP_P, _MIN_P, _PENALTIES, _LOGPROBS, _BIASES, _RESTRICTED = (1 << i for i in range(8))


@dataclass(frozen=True)
class Filters:
    """Which parts of sampling any row of a batch uses: known on the host, so that a step runs no more than it needs."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalties: bool
    biases: bool
    restricted: bool

    @property
    def plain(self) -> bool:
        """The best logit of every row is its token."""
        return self.greedy and not (self.penalties or self.biases or self.restricted)

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> "Filters":
        return cls.of_bits(reduce(or_, map(_bits, params), 0))

    @classmethod
    @cache
    def of_bits(cls, bits: int) -> "Filters":
        """What any row's `_bits` ask for."""
        used = (bool(bits & bit) for bit in (_TOP_K, _TOP_P, _MIN_P, _PENALTIES, _BIASES, _RESTRICTED))
        return cls(not bits & _DRAWS, *used)


def _bits(params: SamplingParams) -> int:
    """The parts of sampling that a request uses."""
    return (
        _DRAWS * (not params.greedy)
        | _TOP_K * (params.top_k > 0)
        | _TOP_P * (params.top_p < 1)
        | _MIN_P * (params.min_p > 0)
        | _PENALTIES * params.uses_penalties
        | _LOGPROBS * (params.logprobs is not None)
        | _BIASES * bool(num_biases(params))
        | _RESTRICTED * (params.allowed_token_ids is not None)
    )


class RowRequirements:
    """What the requests of all rows want of a step's sampling, by request row, on the host."""

    def __init__(self, num_rows: int) -> None:
        self._bits = np.zeros(num_rows + 1, np.uint8)
        self._logprobs = np.full(num_rows + 1, -1, np.int64)

    def admit(self, admissions: Iterable[Admission]) -> None:
        for a in admissions:
            self._bits[a.row] = _bits(a.params)
            self._logprobs[a.row] = -1 if a.params.logprobs is None else a.params.logprobs

    def of(self, rows: np.ndarray) -> tuple[Filters, Sequence[int | None]]:
        """What any of the rows [n] uses, and how many alternatives to its token each of them wants, None for no
        log-probabilities; empty if no row wants any."""
        bits = reduce(or_, set(self._bits.take(rows).tobytes()), 0)
        wanted = self._logprobs[rows].tolist() if bits & _LOGPROBS else ()
        return Filters.of_bits(bits), [None if n < 0 else n for n in wanted]


@dataclass(frozen=True)
class Verification:
    """n rows of T inputs to verify, on the device.

    Attributes:
        rows, output_indices: [n] int32 request rows, and the index of the token drawn after the root.
        positions: [n, T] int32 of all inputs: a draw's output index grows with its position.
        drafts: [n, T - 1] int32, of which the first num_drafts [n] int32 are drafts; the rest is padding.
        last_tokens: [R + 1] int32, which gets each row's next root.
        parents, tree_mask: of a tree, as in SpecInfo; None for chains.
    """

    rows: torch.Tensor
    output_indices: torch.Tensor
    positions: torch.Tensor
    drafts: torch.Tensor
    num_drafts: torch.Tensor
    last_tokens: torch.Tensor
    parents: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None

    def earlier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the draw after each input, [n * T, T - 1] each: all drafts of its row, int64, and whether the input sees
        them, int32."""
        n, width = self.positions.shape
        sees = self.tree_mask
        if sees is None:
            sees = torch.ones(width, width, dtype=torch.bool, device=self.drafts.device).tril().expand(n, -1, -1)
        drafts = self.drafts[:, None].expand(-1, width, -1)
        return drafts.reshape(n * width, -1).long(), sees[:, :, 1:].reshape(n * width, -1).int()


@dataclass(frozen=True)
class Accepted:
    """What n rows of a verify step keep.

    Attributes:
        tokens: [n, T] int64 drawn behind the inputs that stay, in order; the first `counts` of a row are its output,
            of which the last is -1 if its logits were not finite.
        counts: [n] int32 inputs that stay, the root included.
        path: [n, T] int64 nodes of a tree that stay, the root first; None for chains, which keep their first inputs.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    path: torch.Tensor | None = None

    def ends(self) -> torch.Tensor:
        """[n] int64: each row's last input that stays, counted over all rows of the step."""
        n, width = self.tokens.shape
        return torch.arange(n, device=self.tokens.device) * width + self.counts - 1


class SamplingTable:
    """Sampling constants and token counts by request row, on the device, written at admission.

    `floats` is [len(FLOATS), R + 1], `integers` [len(INTEGERS), R + 1], the rest [R + 1, ...]: the constants of any
    rows, [n] each, are contiguous.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.floats = torch.zeros(len(FLOATS), num_rows + 1, device=device)
        self.integers = torch.zeros(len(INTEGERS), num_rows + 1, dtype=torch.int32, device=device)
        self.rules = TokenRules(num_rows, vocab_size, device)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.output_counts = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=device)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one row."""
        return 4 * len(FLOATS) + 4 * len(INTEGERS) + 8 + 5 * vocab_size + TokenRules.row_bytes(vocab_size)

    @staticmethod
    def constants(params: SamplingParams, seed: int) -> bytes:
        """A request's row of `pack`: its seed, its FLOATS and its INTEGERS.

        Raises:
            struct.error, OverflowError: the table holds no such number.
        """
        integers = params.top_k, num_biases(params), params.allowed_token_ids is not None
        return _CONSTANTS.pack(seed, *(getattr(params, name) for name in FLOATS), *integers)

    @classmethod
    def pack(cls, admissions: Sequence[Admission]) -> dict[str, np.ndarray]:
        """int32 sections of the step's packed copy: constants as bits, and the tokens that penalties count."""
        counted = [a for a in admissions if a.params.uses_penalties]
        outputs = [(a.row, t) for a in counted for t in a.tokens[a.prompt_len :]]
        prompts = [(a.row, t) for a in counted for t in a.tokens[: a.prompt_len]]
        rows = bytearray().join(cls.constants(a.params, a.seed) for a in admissions)
        constants = np.frombuffer(rows, np.int32).reshape(-1, _CONSTANTS.size // 4)
        return {
            "seeds": constants[:, :2].reshape(-1),
            "floats": constants[:, 2 : -len(INTEGERS)].reshape(-1),
            "integers": constants[:, -len(INTEGERS) :].reshape(-1),
            "penalty_rows": np.array([a.row for a in counted], np.int32),
            "output_tokens": np.array(outputs, np.int32).reshape(-1),
            "prompt_tokens": np.array(prompts, np.int32).reshape(-1),
            **TokenRules.pack(admissions),
        }

    def admit(self, rows: torch.Tensor, sections: dict[str, torch.Tensor]) -> None:
        """Stores what `pack` packed, for request rows `rows` [n]."""
        self.floats[:, rows] = sections["floats"].view(torch.float32).view(-1, len(FLOATS)).t()
        self.integers[:, rows] = sections["integers"].view(-1, len(INTEGERS)).t()
        self.rules.admit(sections)
        self.seeds[rows] = sections["seeds"].view(torch.int64)
        counted = sections["penalty_rows"].long()
        if counted.numel():
            # Filled, not assigned: a Python number behind `[...] =` is copied to the device, which the host waits for.
            self.output_counts.index_fill_(0, counted, 0)
            self.prompt_mask.index_fill_(0, counted, False)
            prompt = sections["prompt_tokens"].view(-1, 2)
            self.prompt_mask[prompt[:, 0], prompt[:, 1]] = torch.ones((), dtype=torch.bool, device=prompt.device)
            self.count(*sections["output_tokens"].view(-1, 2).unbind(1))

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts `tokens` [n] as output of `rows` [n]; a pair may come more than once. A request whose token is -1
        ends with it: what is counted for it does not matter."""
        one = torch.ones((), dtype=torch.int32, device=rows.device).expand(rows.shape)
        self.output_counts.index_put_((rows, tokens.clamp(min=0)), one, accumulate=True)


class Sampler:
    """Picks one token a row; a draw depends on the request's seed and the output index alone."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor, filters: Filters
    ) -> torch.Tensor:
        """logits [n, vocab], rows and output_indices [n] int32 to tokens [n] int64; -1 where logits are not finite."""
        if filters.plain:
            return greedy(logits)
        tokens = self._draw(logits, rows, output_indices, filters, None)
        if filters.penalties:
            self.table.count(rows, tokens)
        return tokens

    def verify(self, logits: torch.Tensor, step: Verification, filters: Filters) -> Accepted:
        """Draws after each of the T inputs of n rows, and which inputs stay (hybridrt.kernels.acceptance).

        Args:
            logits: [n * T, vocab].
        """
        n, width = step.positions.shape
        if filters.plain:
            tokens = greedy(logits).view(n, width)
        else:
            rows = step.rows.repeat_interleave(width, output_size=n * width)
            indices = step.output_indices[:, None] + step.positions - step.positions[:, :1]
            earlier = step.earlier() if filters.penalties else None
            tokens = self._draw(logits, rows, indices.view(-1), filters, earlier).view(n, width)
        kept = self._accept(tokens, step)
        if filters.penalties:
            stays = torch.arange(width, device=tokens.device) < kept.counts[:, None]
            # What was not kept is counted for row 0, which is scratch.
            self.table.count(step.rows[:, None].masked_fill(~stays, 0).view(-1), kept.tokens.view(-1))
        return kept

    @staticmethod
    def _accept(tokens: torch.Tensor, step: Verification) -> Accepted:
        if step.parents is None or step.tree_mask is None:
            counts = accept_chain(tokens, step.drafts, step.num_drafts, step.rows, step.last_tokens)
            return Accepted(tokens, counts)
        counts, path = accept_tree(tokens, step.drafts, step.num_drafts, step.parents, step.tree_mask)
        kept = Accepted(tokens.gather(1, path), counts, path)
        step.last_tokens[step.rows] = kept.tokens.flatten()[kept.ends()].int()
        return kept

    def draft(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
        filters: Filters,
        drafted: torch.Tensor,
    ) -> torch.Tensor:
        """Draws as `__call__` does, for rows that `drafted` [n, k] int64 has run ahead of: none of it is counted."""
        if filters.plain:
            return greedy(logits)
        earlier = drafted.clamp(min=0), torch.ones_like(drafted, dtype=torch.int32)
        return self._draw(logits, rows, output_indices, filters, earlier)

    def _draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
        filters: Filters,
        earlier: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """One draw for each line of logits; `earlier`: tokens that come before it and are not counted yet, [n, k]
        int64, and how often each counts, [n, k] int32."""
        table = self.table
        constants = dict(zip(FLOATS, table.floats.index_select(1, rows)))
        integers = dict(zip(INTEGERS, table.integers.index_select(1, rows)))
        if filters.biases:
            logits = table.rules.biased(logits, rows, integers["num_biases"], output_indices)
        logit_filters = LogitFilters(
            constants["temperature"],
            top_k=integers["top_k"] if filters.top_k else None,
            top_p=constants["top_p"] if filters.top_p else None,
            min_p=constants["min_p"] if filters.min_p else None,
            penalties=self._penalties(rows, constants, earlier) if filters.penalties else None,
            bitmask=table.rules.bitmask(rows, integers["restricted"]) if filters.restricted else None,
        )
        return sample(logits, logit_filters, table.seeds[rows], output_indices.long())

    def _penalties(
        self,
        rows: torch.Tensor,
        constants: dict[str, torch.Tensor],
        earlier: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Penalties:
        """What earlier output costs."""
        counts = self.table.output_counts[rows]
        if earlier is not None:
            counts.scatter_add_(1, *earlier)
        return Penalties(
            constants["repetition_penalty"], constants["presence_penalty"], constants["frequency_penalty"],
            counts, self.table.prompt_mask[rows],
        )  # fmt: skip
