"""Sampling constants, token counts and rules by request row, in tables on the device."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from struct import Struct
from typing import ClassVar, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.packed import A
from hybridrt.kernels.sampling.token_rules import TokenRules
from hybridrt.runtime.step.plan import Admission
from hybridrt.runtime.step.token_rules import RuleArrays, admit_rules, allocate_rules, pack_rules, rule_row_bytes

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = attrgetter(*FLOATS, "top_k")
_CONSTANTS = Struct(f"=q{len(FLOATS)}f2i")


class PenaltyArrays(NamedTuple, Generic[A]):
    """Rows with penalties [n], and (row, token) [m, 2] of their outputs and of their prompts."""

    rows: A
    outputs: A
    prompts: A


class SamplingArrays(NamedTuple, Generic[A]):
    """Table entries of n admitted requests: `SamplingTable.constants` as bits, the seeds [n, 2]
    separate; penalties and rules are None where no request has any."""

    seeds: A
    constants: A
    penalties: PenaltyArrays[A] | None = None
    rules: RuleArrays[A] | None = None


class SamplingTable:
    """Sampling constants, token counts and rules by request row, on the device.

    `floats` is [len(FLOATS), R + 1], the rest [R + 1, ...]: the constants of any rows, [n] each,
    are contiguous.
    """

    CONSTANTS: ClassVar[int] = _CONSTANTS.size // 4 - 2  # integers without the seed

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._constants = torch.zeros(len(FLOATS) + 2, num_rows + 1, dtype=torch.int32, device=device)
        self.top_k, rule_counts = self._constants[-2:]
        self.rules = allocate_rules(rule_counts, vocab_size)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.output_counts = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=device)

    @property
    def floats(self) -> torch.Tensor:
        return self._constants[:-2].view(torch.float32)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one row."""
        return 4 * len(FLOATS) + 8 + 8 + 5 * vocab_size + rule_row_bytes(vocab_size)

    @staticmethod
    def constants(params: SamplingParams, seed: int, rules: TokenRules | None = None) -> bytes:
        """A request's row of `pack`: its seed, its FLOATS, its top_k and its number of rules, -1
        for none.

        Raises:
            struct.error, OverflowError: a number does not fit the table.
        """
        count = -1 if rules is None else rules.count
        return _CONSTANTS.pack(seed, *_NUMBERS(params), count)

    @classmethod
    def pack_constants(cls, admissions: Sequence[Admission]) -> np.ndarray:
        """[n, 2 + CONSTANTS] int32: each request's seed and the rest of its `constants`, as bits."""
        rows = bytearray().join([cls.constants(a.params, a.seed, a.rules) for a in admissions])
        return np.frombuffer(rows, np.int32).reshape(-1, 2 + cls.CONSTANTS)

    @classmethod
    def pack(cls, admissions: Sequence[Admission]) -> SamplingArrays[np.ndarray]:
        constants = cls.pack_constants(admissions)
        counted = [a for a in admissions if a.params.uses_penalties]
        penalties = _pack_penalties(counted) if counted else None
        return SamplingArrays(constants[:, :2], constants[:, 2:], penalties, pack_rules(admissions))

    def enter_rows(self, rows: Tensor, arrays: SamplingArrays[Tensor]) -> None:
        """Stores what `pack` packed, for request rows `rows` [n]."""
        self._constants[:, rows] = arrays.constants.t()
        self.seeds[rows] = arrays.seeds.view(torch.int64).squeeze(1)
        if arrays.rules is not None:
            admit_rules(self.rules, arrays.rules)
        if (penalties := arrays.penalties) is not None:
            counted, prompts = penalties.rows.long(), penalties.prompts
            # Assignment would copy a Python number, and the host would wait for it.
            self.output_counts.index_fill_(0, counted, 0)
            self.prompt_mask.index_fill_(0, counted, False)
            self.prompt_mask[prompts[:, 0], prompts[:, 1]] = torch.ones((), dtype=torch.bool, device=rows.device)
            self.count(*penalties.outputs.unbind(1))

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts `tokens` [n] as output of `rows` [n]; pairs may repeat. -1 counts as token 0: its
        request ends, and its counts no longer matter."""
        one = torch.ones((), dtype=torch.int32, device=rows.device).expand(rows.shape)
        self.output_counts.index_put_((rows, tokens.clamp(min=0)), one, accumulate=True)

    def remember(self, rows: Tensor, output_indices: Tensor, tokens: Tensor) -> None:
        """Stores `tokens` [n] at `output_indices` [n] of `rows` [n], for rules about words."""
        history = self.rules.history
        history[rows, output_indices % history.shape[1]] = tokens.int()


def _pack_penalties(counted: Sequence[Admission]) -> PenaltyArrays[np.ndarray]:
    return PenaltyArrays(
        np.array([a.row for a in counted], np.int32),
        _with_rows((a.row, a.output) for a in counted),
        _with_rows((a.row, a.counted) for a in counted),
    )


def _with_rows(tokens: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """[n, 2] int32: row, token."""
    return np.concatenate([np.stack((np.full(len(column), row, np.int32), column), 1) for row, column in tokens])
