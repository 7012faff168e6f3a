"""Linear layers of named segments, sharded over tensor-parallel ranks.

A merged weight holds several checkpoint matrices with one input (ColumnLinear) or one output
(RowLinear): fewer GEMMs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.layers.methods import Part, make_linear, register
from hybridrt.layers.weights import Build, CheckpointMap, Piece, Transform, parameter, unchanged

# What a block adds, and the residual [T, hidden]; None: already added.
Summands = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Segment:
    """`size` rows (columns of a RowLinear), sharded over `shards` ranks. None: all ranks. Fewer:
    ranks share a copy (KV heads or groups). `bias`: the checkpoint's matrix has one."""

    name: str
    size: int
    shards: int | None = None
    bias: bool = False

    def local(self, tp: TPGroup) -> int:
        """Rows on one rank. ConfigError if they cannot be split."""
        return tp.divide(f"channels of {self.name!r}", self.size, self.shards)


class _SegmentedLinear(nn.Module):
    """A merged weight with its segments along `dim`.

    Args:
        name: prefix of piece names, unique in the model.
        width: size of the other dimension.
    """

    dim: ClassVar[int]

    def __init__(self, name: str, segments: Sequence[Segment], width: int, *, build: Build) -> None:
        super().__init__()
        self.name, self.tp = name, build.tp
        self.segments = {s.name: s for s in segments}
        self.sizes = [s.local(build.tp) for s in segments]
        starts = [sum(self.sizes[:i]) for i in range(len(segments))]
        self.spans = dict(zip(self.segments, zip(starts, self.sizes)))
        self.method = make_linear(build, name, dict(zip(self.segments, self.sizes)), width, self.dim)
        register(self, self.method)
        self.bias: nn.Parameter | None = None
        if any(s.bias for s in segments):
            outputs = width if self.dim else sum(self.sizes)
            self.bias = parameter(outputs, dtype=build.dtype, device=build.device, dummy="zeros")
            self.bias.data.zero_()

    def _part(self, names: Sequence[str], name: str, scale: float, rearrange: Transform = unchanged) -> Part:
        sizes, shards = {n: self.segments[n].size for n in names}, self.segments[name].shards

        def select(t: torch.Tensor) -> torch.Tensor:
            # split, unlike narrow, raises for wrong sizes.
            parts = dict(zip(sizes, rearrange(t).split([*sizes.values()], self.dim)))
            return self.tp.shard(parts[name], self.dim, shards)

        total = sum(sizes.values())
        return Part(f"{self.name}.{name}", self.dim, *self.spans[name], select, total, scale)


class ColumnLinear(_SegmentedLinear):
    """y = x W^T + b with a sharded output: x [T, in], y [T, sum of local segments]. Segments
    without a bias get zeros."""

    dim = 0

    def __init__(self, name: str, in_features: int, segments: Sequence[Segment], *, build: Build) -> None:
        super().__init__(name, segments, in_features, build=build)

    def forward(self, x: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        return self.method.apply(x, self.bias, activation)

    def targets(
        self,
        key: str,
        names: Sequence[str],
        *,
        scale: Mapping[str, float] | None = None,
        bias_scale: Mapping[str, float] | None = None,
        rearrange: Transform = unchanged,
    ) -> CheckpointMap:
        """Targets of `key`.weight (and .bias), whose rows are the segments `names` in order.

        Args:
            scale, bias_scale: multipliers by segment. They differ if a multiplier acts on the
                input.
            rearrange: brings the checkpoint's rows into the order of `names` first.
        """

        def parts(scales: Mapping[str, float] | None) -> list[Part]:
            return [self._part(names, name, (scales or {}).get(name, 1.0), rearrange) for name in names]

        found = self.method.targets(key, parts(scale))
        if self.bias is not None and self.segments[names[0]].bias:
            bias = self.bias.data
            found[f"{key}.bias"] = tuple(
                Piece(f"{p.name}.bias", bias.narrow(0, p.start, p.size), p.select, p.scale) for p in parts(bias_scale)
            )
        return found


class RowLinear(_SegmentedLinear):
    """y = sum over ranks of x W^T, + b, with a sharded input: x [T, sum of local segments], y [T,
    out].

    Attributes:
        adds: whether `onto` may add the residual itself. False if y is normed first.
    """

    dim = 1
    adds = True

    def forward(self, x: torch.Tensor, tail: torch.Tensor | None = None, reduce: bool = True) -> torch.Tensor:
        """y of x, or of [x, tail], which then need no common tensor. `reduce` False: this rank's
        summand, for a caller with a sum over ranks of its own."""
        # One rank: the sum has it once.
        bias = self.bias if self.tp.rank == 0 else None
        y = self.method.apply(x, bias, tail=tail)
        return self.tp.all_reduce(y) if reduce and self.tp.size > 1 else y

    def onto(self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None) -> Summands:
        """`forward`, and the residual to add it to. May overwrite `residual`."""
        adds = self.adds and self.bias is None and x.shape[0] >= self.method.adds_from and residual.dtype == x.dtype
        # One rank: the sum has it once.
        if adds and self.tp.rank == 0:
            y = self.method.apply_onto(residual, x, tail)
        else:
            y = self.method.apply(x, self.bias if self.tp.rank == 0 else None, tail=tail)
        return y if self.tp.size == 1 else self.tp.all_reduce(y), None if adds else residual

    def places(self, like: torch.Tensor) -> list[torch.Tensor]:
        """[T, size] for each segment, T and dtype as `like`: columns of one tensor. Results that
        branches write there need no copy."""
        return list(like.new_empty(like.shape[0], sum(self.sizes)).split_with_sizes(self.sizes, dim=-1))

    def targets(self, key: str, name: str, *, scale: float = 1.0) -> CheckpointMap:
        """Targets of `key`.weight (and .bias), which reads segment `name`. `scale`: factor of its
        output."""
        found = self.method.targets(key, [self._part([name], name, scale)])
        if self.bias is not None and self.segments[name].bias:
            piece = Piece(f"{self.name}.{name}.bias", self.bias.data, unchanged, scale, accumulate=True)
            found[f"{key}.bias"] = (piece,)
        return found
