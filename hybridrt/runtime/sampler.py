"""From logits to tokens: per-row constants that live on the device, and the greedy or sampled tail of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridrt.kernels.acceptance import accept_chain
from hybridrt.kernels.sampling import Penalties, greedy, sample
from hybridrt.runtime.step import Admission
from hybridrt.sampling_params import SamplingParams

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Filters:
    """Which parts of sampling any row of a batch uses: known on the host, so that a step runs no more than it needs."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalties: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Filters":
        return cls(
            greedy=all(p.greedy for p in params),
            top_k=any(p.top_k > 0 for p in params),
            top_p=any(p.top_p < 1 for p in params),
            min_p=any(p.min_p > 0 for p in params),
            penalties=any(p.uses_penalties for p in params),
        )


class SamplingTable:
    """Sampling constants and token counts by request row, [R + 1, ...] on the device, written at admission."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.floats = torch.zeros(num_rows + 1, len(FLOATS), device=device)
        self.top_k = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.output_counts = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=device)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one row."""
        return 4 * len(FLOATS) + 4 + 8 + 5 * vocab_size

    @staticmethod
    def pack(admissions: Sequence[Admission]) -> dict[str, np.ndarray]:
        """int32 sections of the step's packed copy: constants as bits, and the tokens that penalties count."""
        counted = [a for a in admissions if a.params.uses_penalties]
        outputs = [(a.row, t) for a in counted for t in a.tokens[a.prompt_len :]]
        prompts = [(a.row, t) for a in counted for t in a.tokens[: a.prompt_len]]
        floats = [[getattr(a.params, name) for name in FLOATS] for a in admissions]
        return {
            "seeds": np.array([a.seed for a in admissions], np.int64).view(np.int32),
            "floats": np.array(floats, np.float32).reshape(-1).view(np.int32),
            "top_k": np.array([a.params.top_k for a in admissions], np.int32),
            "penalty_rows": np.array([a.row for a in counted], np.int32),
            "output_tokens": np.array(outputs, np.int32).reshape(-1),
            "prompt_tokens": np.array(prompts, np.int32).reshape(-1),
        }

    def admit(self, rows: torch.Tensor, sections: dict[str, torch.Tensor]) -> None:
        """Stores what `pack` packed, for request rows `rows` [n]."""
        self.floats[rows] = sections["floats"].view(torch.float32).view(-1, len(FLOATS))
        self.top_k[rows] = sections["top_k"]
        self.seeds[rows] = sections["seeds"].view(torch.int64)
        counted = sections["penalty_rows"]
        if counted.numel():
            self.output_counts[counted] = 0
            self.prompt_mask[counted] = False
            prompt = sections["prompt_tokens"].view(-1, 2)
            self.prompt_mask[prompt[:, 0], prompt[:, 1]] = True
            self.count(*sections["output_tokens"].view(-1, 2).unbind(1))

    def count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts `tokens` [n] as output of `rows` [n]; a pair may come more than once."""
        one = torch.ones((), dtype=torch.int32, device=rows.device).expand(rows.shape)
        self.output_counts.index_put_((rows, tokens), one, accumulate=True)


class Sampler:
    """Picks one token a row; a draw depends on the request's seed and the output index alone."""

    def __init__(self, table: SamplingTable) -> None:
        self.table = table

    def __call__(
        self, logits: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor, filters: Filters
    ) -> torch.Tensor:
        """logits [n, vocab], rows and output_indices [n] int32 to tokens [n] int64."""
        if filters.greedy and not filters.penalties:
            return greedy(logits)
        tokens = self._draw(logits, rows, output_indices, filters, None)
        if filters.penalties:
            self.table.count(rows, tokens)
        return tokens

    def verify(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        filters: Filters,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws after each of the T inputs of n rows, and how many inputs stay (hybridrt.kernels.acceptance).

        Args:
            logits: [n * T, vocab]; rows, output_indices: [n * T] int32, each row's repeated.
            drafts: [n, T - 1] int32; num_drafts: [n] int32.
        Returns:
            tokens [n, T] int64, of which the first `accepted` [n] int32 are the row's output.
        """
        shape = (drafts.shape[0], drafts.shape[1] + 1)
        if filters.greedy and not filters.penalties:
            tokens = greedy(logits).view(shape)
        else:
            tokens = self._draw(logits, rows, output_indices, filters, drafts).view(shape)
        accepted = accept_chain(tokens, drafts, num_drafts)
        if filters.penalties:
            kept = torch.arange(shape[1], device=tokens.device) < accepted[:, None]
            # Row 0 counts what was not kept: nobody reads it.
            self.table.count(rows.view(shape).masked_fill(~kept, 0).view(-1), tokens.view(-1))
        return tokens, accepted

    def _draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
        filters: Filters,
        drafts: torch.Tensor | None,
    ) -> torch.Tensor:
        table = self.table
        constants = dict(zip(FLOATS, table.floats[rows].unbind(1)))
        return sample(
            logits,
            temperature=constants["temperature"],
            seeds=table.seeds[rows],
            indices=output_indices.long(),
            top_k=table.top_k[rows] if filters.top_k else None,
            top_p=constants["top_p"] if filters.top_p else None,
            min_p=constants["min_p"] if filters.min_p else None,
            penalties=self._penalties(rows, constants, drafts) if filters.penalties else None,
        )

    def _penalties(
        self, rows: torch.Tensor, constants: dict[str, torch.Tensor], drafts: torch.Tensor | None
    ) -> Penalties:
        """What earlier output costs; before the t-th draw of a verified row, its first t drafts are output too."""
        counts = self.table.output_counts[rows]
        if drafts is not None:
            n, width = drafts.shape
            per_input = counts.view(n, width + 1, -1)
            for t in range(width):
                index = drafts[:, t, None, None].expand(-1, width - t, 1).long()
                per_input[:, t + 1 :].scatter_add_(2, index, torch.ones_like(index, dtype=counts.dtype))
        return Penalties(
            constants["repetition_penalty"], constants["presence_penalty"], constants["frequency_penalty"],
            counts, self.table.prompt_mask[rows],
        )  # fmt: skip
