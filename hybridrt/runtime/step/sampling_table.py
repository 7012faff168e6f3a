"""Constants, token counts and rules of sampling by request row: packed at admission, kept on the device."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from struct import Struct
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.sampling.token_rules import TokenRules
from hybridrt.runtime.step.plan import NO_INTEGERS, Admission
from hybridrt.runtime.step.token_rules import admit_rules, allocate_rules, pack_rules, rule_row_bytes

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = attrgetter(*FLOATS, "top_k")
_CONSTANTS = Struct(f"=q{len(FLOATS)}f2i")


class SamplingTable:
    """Sampling constants, token counts and rules by request row, on the device, written at admission.

    `floats` is [len(FLOATS), R + 1], the rest [R + 1, ...]: the constants of any rows, [n] each, are contiguous.
    """

    CONSTANTS: ClassVar[int] = _CONSTANTS.size // 4 - 2  # integers of a request's `constants`, its seed apart

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
        """A request's row of `pack`: its seed, its FLOATS, its top_k and its number of rules, -1 for none at all.

        Raises:
            struct.error, OverflowError: the table holds no such number.
        """
        count = -1 if rules is None else rules.count
        return _CONSTANTS.pack(seed, *_NUMBERS(params), count)

    @classmethod
    def pack_constants(cls, admissions: Sequence[Admission]) -> np.ndarray:
        """[n, 2 + CONSTANTS] int32: the seed of each request and the rest of its `constants`, as bits."""
        rows = bytearray().join(cls.constants(a.params, a.seed, a.rules) for a in admissions)
        return np.frombuffer(rows, np.int32).reshape(-1, 2 + cls.CONSTANTS)

    @classmethod
    def pack(cls, admissions: Sequence[Admission]) -> dict[str, np.ndarray]:
        """int32 sections of the step's packed copy: constants as bits, the tokens that penalties count, and rules."""
        counted = [a for a in admissions if a.params.uses_penalties]
        constants = cls.pack_constants(admissions)
        return {
            "seeds": constants[:, :2],
            "constants": constants[:, 2:],
            "penalty_rows": np.array([a.row for a in counted], np.int32),
            "output_tokens": _with_rows((a.row, a.output) for a in counted),
            "prompt_tokens": _with_rows((a.row, a.counted) for a in counted),
            **pack_rules(admissions),
        }

    def admit(self, rows: Tensor, sections: dict[str, Tensor]) -> None:
        """Stores what `pack` packed, for request rows `rows` [n]."""
        self._constants[:, rows] = sections["constants"].t()
        self.seeds[rows] = sections["seeds"].view(torch.int64).squeeze(1)
        if "rules" in sections:
            admit_rules(self.rules, sections)
        counted = sections["penalty_rows"].long()
        if counted.numel():
            # Filled, not assigned: a Python number behind `[...] =` is copied to the device, which the host waits for.
            self.output_counts.index_fill_(0, counted, 0)
            self.prompt_mask.index_fill_(0, counted, False)
            prompt = sections["prompt_tokens"].view(-1, 2)
            self.prompt_mask[prompt[:, 0], prompt[:, 1]] = torch.ones((), dtype=torch.bool, device=prompt.device)
            self.count(*sections["output_tokens"].view(-1, 2).unbind(1))

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts `tokens` [n] as output of `rows` [n]; a pair may come more than once. A request whose token is -1
        ends with it: what is counted for it does not matter."""
        one = torch.ones((), dtype=torch.int32, device=rows.device).expand(rows.shape)
        self.output_counts.index_put_((rows, tokens.clamp(min=0)), one, accumulate=True)

    def remember(self, rows: Tensor, output_indices: Tensor, tokens: Tensor) -> None:
        """Notes `tokens` [n] as those of output index `output_indices` [n] of `rows` [n], for rules about words."""
        history = self.rules.history
        history[rows, output_indices % history.shape[1]] = tokens.int()


def _with_rows(tokens: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """[2 n] int32: of each token its row, then itself."""
    pairs = [np.stack((np.full(len(column), row, np.int32), column), 1).ravel() for row, column in tokens]
    return np.concatenate((NO_INTEGERS, *pairs))
