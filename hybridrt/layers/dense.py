"""Parts of a decoder around its mixers: the feed-forward part, the embedding and the output head."""

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.dense.norm_activation import clamped_silu_and_mul
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.layers.linear import ColumnLinear, DenseMethod, RowLinear, Segment, Summands
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import (
    Build,
    CheckpointTarget,
    whole,
)


class MLP(nn.Module):
    """down(silu(gate x) * up x), gate and up in one GEMM (Shazeer 2020); or down(relu(up x)^2) (So
    et al. 2021).

    Args:
        activation: "silu_and_mul" for the first, "relu2" for the second.
        scales: multipliers of gate and down.
        limit: clamps both factors of the first (`clamped_silu_and_mul`); None: no clamp.
    """

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, *, activation: Activation = "silu_and_mul",
        bias: bool = False, scales: tuple[float, float] = (1.0, 1.0), limit: float | None = None, build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scales, self.limit = scales, limit
        parts = ["gate", "up"] if activation == "silu_and_mul" else ["up"]
        self.activation = activation if limit is None else None  # products do not fuse the clamp
        into = [Segment(part, intermediate_size, bias=bias) for part in parts]
        self.up = ColumnLinear(f"{name}.{'_'.join(parts)}", hidden_size, into, build=build)
        self.down = RowLinear(f"{name}.down", [Segment("x", intermediate_size, bias=bias)], hidden_size, build=build)

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        """MLP of norm(x + residual), and x + residual. `batch` is only for experts."""
        h, residual = self.up.method.apply_normed(norm, x, residual, self.up.bias, self.activation)
        return self.down.onto(residual, h if self.limit is None else clamped_silu_and_mul(h, self.limit))

    def summand(self, x: torch.Tensor, reduce: bool = False) -> torch.Tensor:
        """MLP of x, [T, hidden] to [T, hidden]. `reduce` as in RowLinear."""
        h = self.up(x, self.activation)
        return self.down(h if self.limit is None else clamped_silu_and_mul(h, self.limit), reduce=reduce)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        gate, down = self.scales
        found = self.down.targets(f"{key}.down_proj", "x", scale=down)
        for part in self.up.segments:
            scale = {part: gate if part == "gate" else 1.0}
            found |= self.up.targets(f"{key}.{part}_proj", [part], scale=scale, bias_scale=scale)
        return found


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
        self.method = DenseMethod(self.rows, hidden_size, build)
        self.weight = self.method.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 to [T, hidden]."""
        if self.tp.size == 1:
            x = F.embedding(input_ids, self.weight)
        else:
            local = input_ids - self.tp.rank * self.rows
            outside = (local < 0) | (local >= self.rows)
            x = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill_(outside[:, None], 0)
            x = self.tp.all_reduce(x)
        return x if self.multiplier == 1.0 else x * self.multiplier

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocab]."""
        local = self.method.apply(x, None)
        return (local if self.tp.size == 1 else self.tp.all_gather_last(local))[:, : self.vocab_size]

    def logits_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """`logits` into a contiguous `out` [n, vocab]; without a copy on a single rank."""
        if self.tp.size == 1:
            self.method.apply_into(out, x, None)
        else:
            out.copy_(self.logits(x))

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        return {f"{key}.weight": whole(f"{self.name}.weight", self.weight.data, self._select)}

    def _select(self, t: torch.Tensor) -> torch.Tensor:
        if t.shape[0] != self.vocab_size:
            raise RuntimeError(f"the vocabulary has {t.shape[0]} rows, config.json says {self.vocab_size}")
        local = t[self.tp.rank * self.rows : (self.tp.rank + 1) * self.rows]
        missing = self.rows - local.shape[0]
        return F.pad(local, (0, 0, 0, missing)) if missing else local
