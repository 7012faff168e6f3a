"""Linear layers made of named segments, sharded over tensor-parallel ranks.

A merged weight is several checkpoint matrices with one input (ColumnLinear: q, k, v; z, x, B, C, dt; gate, up) or one
output (RowLinear: attention and SSM). Merging makes one GEMM of several; naming keeps each loadable and foldable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.distributed.groups import TPGroup
from hybridrt.kernels.activation import relu2, silu_and_mul
from hybridrt.kernels.skinny_linear import Activation, is_skinny, skinny_linear
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointTarget, Piece, Transform, parameter

# What a block adds and what it is to be added to, [T, hidden] each; None where the first has been added already.
Summands = tuple[torch.Tensor, torch.Tensor | None]

ADDS_FROM = 1024  # tokens: of fewer, the bytes that it saves are too few to be seen in a step


@dataclass(frozen=True)
class Segment:
    """`size` whole rows (columns of a RowLinear) named `name`, cut over `shards` ranks: None for all of them, fewer
    where ranks share a copy (KV heads or groups fewer than ranks)."""

    name: str
    size: int
    shards: int | None = None

    def local(self, tp: TPGroup) -> int:
        """Rows on one rank; ConfigError if they cannot be cut."""
        return tp.divide(f"channels of {self.name!r}", self.size, self.shards)


class DenseMethod:
    """How a linear layer stores and applies its weight: here in the model's dtype. A quantised method replaces it.

    A step of few tokens on a GPU takes one kernel for the product with the norm before it and the activation behind it.
    """

    def create(self, out_features: int, in_features: int, build: Build) -> nn.Parameter:
        weight = parameter(out_features, in_features, dtype=build.dtype, device=build.device)
        if build.device.type == "cpu" and build.dtype == torch.float32:
            # Column by column in memory, which BLAS multiplies a fifth faster with few rows and no slower with many.
            weight.data = torch.empty(in_features, out_features).t()
        return weight

    def slot(self, weight: nn.Parameter, dim: int, start: int, size: int) -> torch.Tensor:
        """Where a segment of the checkpoint lands, and where its scale is applied."""
        return weight.data.narrow(dim, start, size)

    def apply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
        tail: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """act(x W^T + b) for x [T, in], whose last columns may come in `tail`."""
        if is_skinny(x, weight, activation):
            return skinny_linear(x, weight, bias, tail=tail, activation=activation)[0]
        y = F.linear(x if tail is None else side_by_side(x, tail), weight, bias)
        if activation is None:
            return y
        return silu_and_mul(y) if activation == "silu_and_mul" else relu2(y)

    def adds(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Whether the product should end with the addition of a residual, so that the norm behind it moves half the
        bytes."""
        return x.shape[0] >= ADDS_FROM and residual.dtype == x.dtype

    def apply_onto(
        self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor | None
    ) -> torch.Tensor:
        """x W^T + residual, in the place of `residual`; where `adds` says so."""
        return residual.addmm_(x if tail is None else side_by_side(x, tail), weight.t())

    def apply_normed(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(act(norm(x + residual) W^T + b), x + residual), as `norm` counts a missing residual."""
        if not is_skinny(x, weight, activation):
            h, residual = norm(x, residual)
            return self.apply(h, weight, bias, activation), residual
        y, total = skinny_linear(
            x, weight, bias, norm_weight=norm.weight, eps=norm.eps, residual=residual, activation=activation
        )
        return y, x if total is None else total


class _SegmentedLinear(nn.Module):
    def __init__(self, name: str, segments: Sequence[Segment], build: Build, method: DenseMethod) -> None:
        super().__init__()
        self.name, self.tp, self.method = name, build.tp, method
        self.segments = {s.name: s for s in segments}
        self.sizes = [s.local(build.tp) for s in segments]
        starts = [sum(self.sizes[:i]) for i in range(len(segments))]
        self.spans = dict(zip(self.segments, zip(starts, self.sizes)))

    def _take(self, names: Sequence[str], name: str, dim: int) -> Transform:
        """Selects segment `name` of a checkpoint tensor that holds `names` side by side, then this rank's shard."""
        sizes, index = [self.segments[n].size for n in names], list(names).index(name)
        # split, not narrow: it raises unless the sizes add up to the whole tensor.
        return lambda t: self.tp.shard(t.split(sizes, dim)[index], dim, self.segments[name].shards)


class ColumnLinear(_SegmentedLinear):
    """y = x W^T + b with the output cut over ranks. x [T, in], y [T, sum of local segments].

    Args:
        name: prefix of the piece names, unique in the model.
        bias: names of the segments that have a bias; the others get zeros.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        segments: Sequence[Segment],
        *,
        bias: Sequence[str] = (),
        build: Build,
        method: DenseMethod | None = None,
    ) -> None:
        super().__init__(name, segments, build, method or DenseMethod())
        total = sum(self.sizes)
        self.weight = self.method.create(total, in_features, build)
        self.bias = parameter(total, dtype=build.dtype, device=build.device, dummy="zeros") if bias else None
        if self.bias is not None:
            self.bias.data.zero_()

    def forward(self, x: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        return self.method.apply(x, self.weight, self.bias, activation)

    def targets(
        self,
        key: str,
        names: Sequence[str],
        *,
        bias: bool = False,
        scale: Mapping[str, float] | None = None,
        bias_scale: Mapping[str, float] | None = None,
        rearrange: Transform | None = None,
    ) -> dict[str, CheckpointTarget]:
        """Targets of `key`.weight (and .bias), whose rows are the segments `names` one after the other.

        Args:
            scale, bias_scale: multipliers by segment name; they differ where a multiplier acts on the input.
            rearrange: brings the checkpoint's row order into that of `names` first.
        """
        pieces = self._pieces(names, "weight", self.weight, scale or {}, rearrange)
        found = {f"{key}.weight": pieces}
        if bias:
            assert self.bias is not None
            found[f"{key}.bias"] = self._pieces(names, "bias", self.bias, bias_scale or {}, rearrange)
        return found

    def _pieces(
        self,
        names: Sequence[str],
        kind: str,
        param: nn.Parameter,
        scale: Mapping[str, float],
        rearrange: Transform | None,
    ) -> CheckpointTarget:
        pieces = []
        for name in names:
            take, start_size = self._take(names, name, 0), self.spans[name]
            select = take if rearrange is None else _compose(rearrange, take)
            dest = self.method.slot(param, 0, *start_size)
            pieces.append(Piece(f"{self.name}.{name}.{kind}", dest, select, scale.get(name, 1.0)))
        return tuple(pieces)


class RowLinear(_SegmentedLinear):
    """y = sum over ranks of x W^T, + b. The input is cut over ranks: x [T, sum of local segments], y [T, out]."""

    def __init__(
        self,
        name: str,
        segments: Sequence[Segment],
        out_features: int,
        *,
        bias: bool = False,
        build: Build,
        method: DenseMethod | None = None,
    ) -> None:
        super().__init__(name, segments, build, method or DenseMethod())
        self.weight = self.method.create(out_features, sum(self.sizes), build)
        self.bias = parameter(out_features, dtype=build.dtype, device=build.device, dummy="zeros") if bias else None
        if self.bias is not None:
            self.bias.data.zero_()

    def forward(self, x: torch.Tensor, tail: torch.Tensor | None = None, reduce: bool = True) -> torch.Tensor:
        """y of x, or of x and `tail` side by side: what two branches made need not be copied into one tensor.
        With `reduce` False this rank's summand alone, for a caller that adds more before it sums over ranks."""
        # One rank adds the bias: the sum over ranks must hold it once.
        bias = self.bias if self.tp.rank == 0 else None
        y = self.method.apply(x, self.weight, bias, tail=tail)
        return self.tp.all_reduce(y) if reduce else y

    def onto(self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None) -> Summands:
        """`forward` and the residual that it is to be added to: how a block ends. May overwrite `residual`."""
        if self.bias is not None or not self.method.adds(residual, x):
            return self(x, tail), residual
        # One rank adds the residual, as it would a bias: the sum over ranks must hold it once.
        if self.tp.rank == 0:
            total = self.method.apply_onto(residual, x, self.weight, tail)
        else:
            total = self.method.apply(x, self.weight, None, tail=tail)
        return self.tp.all_reduce(total), None

    def places(self, like: torch.Tensor) -> list[torch.Tensor]:
        """[T, size] for each segment, T and dtype as `like`: neighbouring columns of one tensor. What branches leave
        there need not be copied together."""
        return list(like.new_empty(like.shape[0], sum(self.sizes)).split(self.sizes, dim=-1))

    def targets(self, key: str, name: str, *, bias: bool = False, scale: float = 1.0) -> dict[str, CheckpointTarget]:
        """Targets of `key`.weight (and .bias), the matrix that reads segment `name`. `scale` scales its output."""
        start, size = self.spans[name]
        dest = self.method.slot(self.weight, 1, start, size)
        found: dict[str, CheckpointTarget] = {
            f"{key}.weight": (Piece(f"{self.name}.{name}.weight", dest, self._take([name], name, 1), scale),)
        }
        if bias:
            assert self.bias is not None
            piece = Piece(f"{self.name}.{name}.bias", self.bias.data, lambda t: t, scale, accumulate=True)
            found[f"{key}.bias"] = (piece,)
        return found


def norm_linear(
    norm: RMSNorm,
    linear: ColumnLinear,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(act(linear(norm(x + residual))), x + residual) for x, residual [T, in]: how a block begins."""
    return linear.method.apply_normed(norm, x, residual, linear.weight, linear.bias, activation)


def side_by_side(x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """x [T, a] and tail [T, b] as [T, a + b]: a view if they are neighbouring columns of one tensor, else a copy."""
    rows, width = x.shape[0], x.shape[1] + tail.shape[1]
    row_stride = width if rows == 1 else x.stride(0)  # a single row has none that counts
    alike = x.stride(1) == tail.stride(1) == 1 and (rows == 1 or tail.stride(0) == row_stride)
    neighbours = alike and tail.data_ptr() == x.data_ptr() + x.shape[1] * x.element_size()
    if neighbours and x.untyped_storage().data_ptr() == tail.untyped_storage().data_ptr():
        return x.as_strided((rows, width), (row_stride, 1))
    return torch.cat((x, tail), dim=-1)


def _compose(first: Transform, second: Transform) -> Transform:
    return lambda t: second(first(t))
