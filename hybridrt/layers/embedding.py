"""Token embedding and output head, sharded over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.layers.methods import Part, make_linear, register
from hybridrt.layers.weights import Build, CheckpointTarget


class VocabParallelEmbedding(nn.Module):
    """Equal shards of the vocabulary's rows, the last one padded with zeros.

    `multiplier` scales the embedding at run time, because a tied head needs the same weight
    unscaled.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        build: Build,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self.tp, self.multiplier = name, vocab_size, build.tp, multiplier
        self.rows = -(-vocab_size // self.tp.size)
        self.dtype = build.dtype
        self.method = make_linear(build, name, {"rows": self.rows}, hidden_size, 0)
        register(self, self.method)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 to [T, hidden]."""
        if self.tp.size == 1:
            x = self.method.lookup(input_ids, self.dtype)
        else:
            local = input_ids - self.tp.rank * self.rows
            outside = (local < 0) | (local >= self.rows)
            x = self.method.lookup(local.masked_fill(outside, 0), self.dtype).masked_fill_(outside[:, None], 0)
            x = self.tp.all_reduce(x)
        return x if self.multiplier == 1.0 else x * self.multiplier

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocab]."""
        return self.tp.all_gather_last(self.method.apply(x, None))[:, : self.vocab_size]

    def logits_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`logits` into a contiguous `out` [n, vocab]; without a copy on a single rank."""
        if self.tp.size == 1:
            self.method.apply_into(out, x, None)
        else:
            out.copy_(self.logits(x))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return self.method.targets(key, [Part(f"{self.name}.rows", 0, 0, self.rows, self._select, self.vocab_size)])

    def _select(self, t: torch.Tensor) -> torch.Tensor:
        if t.shape[0] != self.vocab_size:
            raise RuntimeError(f"the vocabulary has {t.shape[0]} rows, config.json says {self.vocab_size}")
        local = t[self.tp.rank * self.rows : (self.tp.rank + 1) * self.rows]
        missing = self.rows - local.shape[0]
        return F.pad(local, (0, 0, 0, missing)) if missing else local
