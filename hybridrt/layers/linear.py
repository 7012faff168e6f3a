"""Linear layers of named segments with their methods, the feed-forward part, embedding and head.

A merged weight holds several checkpoint matrices with one input (ColumnLinear) or one output
(RowLinear): fewer GEMMs.

Packages add methods by entry points of `hybridrt.linear_methods`, "name = module:class".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.plugins import Plugins
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.linear import ONEDNN_FROM, add_linear, linear, stored_by_columns
from hybridrt.kernels.dense.moe import ExpertStack, fused_experts
from hybridrt.kernels.dense.norm_activation import clamped_silu_and_mul
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, InputNorm, fuses, is_skinny, skinny_linear
from hybridrt.layers.summands import (
    Arriving,
    Hidden,
    Summands,
    arriving,
    in_halves,
    stacked,
    summed,
    summed_later,
)
from hybridrt.layers.weights import (
    Build,
    CheckpointMap,
    CheckpointTarget,
    ExpertPart,
    ExpertsMethod,
    LinearMethod,
    Method,
    Part,
    Piece,
    Transform,
    parameter,
    unchanged,
)

if TYPE_CHECKING:
    from hybridrt.layers.norm import RMSNorm

SKINNY_ON = ("cuda",)
ALIGNED = 8  # numbers: 16 bytes of bfloat16, which fast products of cuBLAS and loads of 16 bytes need


class DenseExperts(ExpertsMethod):
    """Stacked weights of experts in the model's dtype: up [E, rows, in], down [E, in, size]."""

    def __init__(
        self, name: str, count: int, rows: int, in_features: int, size: int, build: Build, up: Scheme = PLAIN,
        down: Scheme = PLAIN,
    ) -> None:  # fmt: skip
        self.up = parameter(count, rows, in_features, dtype=build.dtype, device=build.device)
        self.down = parameter(count, in_features, size, dtype=build.dtype, device=build.device)

    def targets(self, key: str, part: ExpertPart) -> CheckpointMap:
        stack = self.up.data.narrow(1, part.start, part.size) if part.matrix == "up" else self.down.data
        piece = Piece(f"{part.name}.weight", stack.narrow(0, part.first, part.count), part.select, part.scale)
        return {f"{key}.weight": (piece,)}

    def apply(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, activation: Literal["silu", "relu2"],
        limit: float | None = None, alpha: float | None = None,
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        stack = ExpertStack(self.up, self.down, activation, limit, alpha, *(biases or ()))
        return fused_experts(x, stack, weights, ids)


class DenseMethod(LinearMethod):
    """A weight in the model's dtype or, on a CPU, in one of fewer bytes (`Scheme.dtype`).

    On a GPU, a step of few tokens runs norm, product and activation as one kernel.
    """

    experts = DenseExperts
    merges_inputs = True
    adds_from = 1024  # the next norm then moves half the bytes

    def __init__(
        self, out_features: int, in_features: int, build: Build, scheme: Scheme = PLAIN, parts: Sequence[int] = ()
    ) -> None:
        dtype = scheme.dtype or build.dtype
        self.weight = parameter(out_features, in_features, dtype=dtype, device=build.device)
        self.skinny = build.device.type in SKINNY_ON
        self._linear_from = ONEDNN_FROM if dtype == build.dtype and not self.skinny else 0
        self._activations = {name: activation.for_device(build.device) for name, activation in ACTIVATIONS.items()}
        if stored_by_columns(self.weight):
            self.weight.data = torch.empty(in_features, out_features, dtype=build.dtype, device=build.device).t()

    def targets(self, key: str, parts: Sequence[Part]) -> CheckpointMap:
        weight = self.weight.data
        pieces = (
            Piece(f"{part.name}.weight", weight.narrow(part.dim, part.start, part.size), part.select, part.scale)
            for part in parts
        )
        return {f"{key}.weight": tuple(pieces)}

    def apply(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None,
        tail: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self.skinny and is_skinny(x, self.weight, activation):
            return skinny_linear(x, self.weight, bias, tail=tail, activation=activation)[0]
        x = x if tail is None else side_by_side(x, tail)
        multiply = linear if x.shape[0] * self.weight.numel() >= self._linear_from else F.linear
        y = multiply(x, self.weight, bias)
        return y if activation is None else self._activations[activation](y)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.embedding(ids, self.weight).to(dtype)

    def apply_into(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        if is_skinny(x, self.weight, None) and out.is_contiguous():
            skinny_linear(x, self.weight, bias, out=out)
            return
        if self.weight.dtype != x.dtype:
            super().apply_into(out, x, bias)
            return
        weight = self.weight.t()
        torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)

    def apply_onto(self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None) -> torch.Tensor:
        return add_linear(residual, x if tail is None else side_by_side(x, tail), self.weight)

    def apply_normed(
        self, norm: "RMSNorm", x: Hidden, residual: torch.Tensor | None, bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if not isinstance(x, torch.Tensor):
            if isinstance(x, Arriving) or len(x.summand) > 1:  # the product of one token has its norm
                h, residual = x.normed(norm, residual)
                return self.apply(h, bias, activation), residual
            x = summed(x)
        if not self.skinny or not is_skinny(x, self.weight, activation):
            h, residual = norm(x) if residual is None else norm.add(x, residual, norm.weight, norm.eps)
            return self.apply(h, bias, activation), residual
        input_norm = InputNorm(norm.weight, norm.eps, residual)
        y, total = skinny_linear(x, self.weight, bias, norm=input_norm, activation=activation)
        return y, x if total is None else total

    def fuses_activation(self, tokens: int, activation: Activation) -> bool:
        return self.skinny and fuses(tokens, self.weight, activation)

    def apply_each(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        even = len(self.weight) % (8 * len(inputs)) == 0
        if even and len(inputs[0]) == 1 and is_skinny(inputs[0], self.weight, None):
            x = reduce(side_by_side, inputs)
            return skinny_linear(x, self.weight, parts=len(inputs))[0].chunk(len(inputs), -1)
        return [linear(x, part) for x, part in zip(inputs, self.weight.chunk(len(inputs)), strict=True)]


class MixedMethod(LinearMethod):
    """A merged weight with one method for each run of segments of equal schemes.

    Args:
        runs: (method, length along `dim`), in order.
        dim: 0: runs write neighbouring columns of one output. 1: runs read neighbouring columns of
            one input, and their products are added.
    """

    def __init__(self, runs: Sequence[tuple[LinearMethod, int]], dim: int) -> None:
        self.runs, self.sizes, self.dim = [method for method, _ in runs], [size for _, size in runs], dim

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{name}_{i}": p for i, run in enumerate(self.runs) for name, p in run.parameters().items()}

    def finish(self) -> None:
        for run in self.runs:
            run.finish()
        whole = self.runs[0].joined(self.runs[1:]) if self.dim == 1 else None
        if whole is not None:
            self.runs, self.sizes = [whole], [sum(self.sizes)]

    def targets(self, key: str, parts: Sequence[Part]) -> CheckpointMap:
        found: CheckpointMap = {}
        for i, run in enumerate(self.runs):
            start, end = sum(self.sizes[:i]), sum(self.sizes[: i + 1])
            mine = [replace(part, start=part.start - start) for part in parts if start <= part.start < end]
            for name, pieces in (run.targets(key, mine) if mine else {}).items():
                found[name] = found.get(name, ()) + pieces
        return found

    def apply(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None,
        tail: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        x = x if tail is None else side_by_side(x, tail)
        if self.dim == 0:
            out = x.new_empty(x.shape[0], sum(self.sizes))
            biases = [None] * len(self.runs) if bias is None else bias.split(self.sizes)
            for run, part, its_bias in zip(self.runs, out.split(self.sizes, -1), biases, strict=True):
                run.apply_into(part, x, its_bias)
        else:
            first, *rest = zip(self.runs, x.split(self.sizes, -1), strict=True)
            out = first[0].apply(first[1], bias)
            for run, part in rest:
                out = run.apply_onto(out, part)
        return out if activation is None else ACTIVATIONS[activation](out)


_QUANT = {name.lower(): f"hybridrt.layers.quant.methods:{name}" for name in ("Fp8", "Int8", "Int4", "Fp4")}
BUILT_IN = {"dense": f"{__name__}:DenseMethod", **_QUANT}
_METHODS = Plugins("hybridrt.linear_methods", BUILT_IN, "method of linear layers", LinearMethod, classes=True)


@cache
def linear_method(name: str) -> type[LinearMethod]:
    """A method class by name.

    Raises:
        BackendError: there is none, its package cannot be imported, or it brings something else.
    """
    return _METHODS.load(name)


def experts_method(name: str) -> type[ExpertsMethod]:
    """The class for experts. BackendError as `linear_method`, or if it has none."""
    experts = linear_method(name).experts
    if experts is None:
        raise BackendError(f"method {name!r} serves no stacks of experts; leave the experts dense")
    return experts


def make_experts(
    build: Build, name: str, matrices: Sequence[str], count: int, rows: int, in_features: int, size: int
) -> ExpertsMethod:
    """The method of experts `name`, which are all stored like the first one, gate and up alike.

    Args:
        matrices: those of an expert without "down", as `build.scheme` knows them.
        count, rows, in_features, size: as in ExpertsMethod.
    """
    up, down = build.scheme(f"{name}.0.{matrices[0]}"), build.scheme(f"{name}.0.down")
    kind = experts_method(down.method if up == PLAIN else up.method)
    return kind(name, count, rows, in_features, size, build, up, down)


def make_linear(build: Build, name: str, segments: Mapping[str, int], width: int, dim: int) -> LinearMethod:
    """The method of layer `name`, with a merged weight of `segments` (sizes by name).

    Args:
        dim: 0 for a weight [sum of sizes, width], 1 for [width, sum of sizes].
    """
    runs: list[tuple[Scheme, list[int]]] = []
    for segment, size in segments.items():
        scheme = build.scheme(f"{name}.{segment}")
        if runs and runs[-1][0] == scheme and (dim == 0 or linear_method(scheme.method).merges_inputs):
            runs[-1][1].append(size)
        else:
            runs.append((scheme, [size]))
    made = []
    for scheme, sizes in runs:
        total = sum(sizes)
        shape, parts = ((total, width), sizes) if dim == 0 else ((width, total), [width])
        made.append((linear_method(scheme.method)(*shape, build, scheme, parts), total))
    return made[0][0] if len(made) == 1 else MixedMethod(made, dim)


def register(module: nn.Module, method: Method) -> None:
    """Makes a method's parameters those of its layer, instead of the ones that it had before."""
    for name in getattr(module, "of_method", ()):
        del module._parameters[name]
    found = method.parameters()
    for name, param in found.items():
        module.register_parameter(name, param)
    module.of_method = tuple(found)  # type: ignore[assignment]


def finish(model: nn.Module) -> None:
    """Calls `finish` of all methods of a model. They may have other parameters then."""
    for module in model.modules():
        method = getattr(module, "method", None)
        if isinstance(method, Method):
            method.finish()
            register(module, method)


def side_by_side(x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """x [T, a] and tail [T, b] as [T, a + b]: a view of neighbouring columns, else a copy."""
    rows, width = x.shape[0], x.shape[1] + tail.shape[1]
    row_stride = width if rows == 1 else x.stride(0)  # a single row's stride means nothing
    alike = x.stride(1) == tail.stride(1) == 1 and (rows == 1 or tail.stride(0) == row_stride)
    neighbours = alike and tail.data_ptr() == x.data_ptr() + x.shape[1] * x.element_size()
    if neighbours and x.untyped_storage().data_ptr() == tail.untyped_storage().data_ptr():
        return x.as_strided((rows, width), (row_stride, 1))
    return torch.cat((x, tail), dim=-1)


@dataclass(frozen=True)
class Segment:
    """`size` rows (columns of a RowLinear), sharded over `shards` ranks. None: all ranks. Fewer:
    ranks share a copy (KV heads, or a single group of B and C). `bias`: the checkpoint's matrix has one."""

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
        aligned: adds rows of zeros to a dense weight, so that there is a multiple of ALIGNED.
    """

    dim: ClassVar[int]

    def __init__(
        self, name: str, segments: Sequence[Segment], width: int, *, build: Build, aligned: bool = False
    ) -> None:
        super().__init__()
        self.name, self.tp = name, build.tp
        self.segments = {s.name: s for s in segments}
        self.sizes = [s.local(build.tp) for s in segments]
        starts = [sum(self.sizes[:i]) for i in range(len(segments))]
        self.spans = dict(zip(self.segments, zip(starts, self.sizes)))
        dense = all(build.scheme(f"{name}.{segment}") == PLAIN for segment in self.segments)
        self.padding = -sum(self.sizes) % ALIGNED if aligned and dense else 0
        *others, last = self.sizes
        rows = dict(zip(self.segments, [*others, last + self.padding]))
        self.method = make_linear(build, name, rows, width, self.dim)
        register(self, self.method)
        if self.padding:
            for param in self.method.parameters().values():
                param.data[-self.padding :].zero_()
        self.bias: nn.Parameter | None = None
        if any(s.bias for s in segments):
            outputs = width if self.dim else sum(self.sizes) + self.padding
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


def parameter_count(model: nn.Module) -> int:
    """Numbers in a model's parameters, without the padding of its projections."""
    projections = [m for m in model.modules() if isinstance(m, _SegmentedLinear) and m.padding]
    padding = sum(m.padding * p[0].numel() for m in projections for p in m.parameters())
    return sum(p.numel() for p in model.parameters()) - padding


class ColumnLinear(_SegmentedLinear):
    """y = x W^T + b with a sharded output: x [T, in], y [T, sum of local segments]. Segments
    without a bias get zeros.

    Args:
        aligned: a row of y begins a multiple of ALIGNED numbers after the one before, for fast products and
            loads. For segments with one row for each head, of which a rank may have any number.
    """

    dim = 0

    def __init__(
        self, name: str, in_features: int, segments: Sequence[Segment], *, build: Build, aligned: bool = False
    ) -> None:
        super().__init__(name, segments, in_features, build=build, aligned=aligned)

    def forward(self, x: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        y = self.method.apply(x, self.bias, activation)
        return y[:, : -self.padding] if self.padding else y

    def normed(self, norm: "RMSNorm", x: Hidden, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual) W^T + b, x + residual), without a residual as in `norm`."""
        if not isinstance(x, Arriving):
            y, residual = self.method.apply_normed(norm, x, residual, self.bias)
            return y[:, : -self.padding] if self.padding else y, residual
        y, totals, first = x.new_empty(sum(self.sizes) + self.padding), list[torch.Tensor](), 0
        for piece, rows in x.with_rows(residual):
            h, total = norm(piece, rows)
            self.method.apply_into(y[first : first + len(h)], h, self.bias)
            totals.append(total)
            first += len(h)
        return y[:, : -self.padding] if self.padding else y, stacked(totals)

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

    def forward(
        self, x: torch.Tensor, tail: torch.Tensor | None = None, reduce: bool = True, before: Activation | None = None
    ) -> torch.Tensor:
        """y of x, or of [x, tail], which then need no common tensor.

        Args:
            reduce: False for this rank's summand, for a caller with a sum over ranks of its own.
            before: an activation that is still to be applied to x. Not with a tail.
        """
        bias = self.bias if self.tp.rank == 0 else None  # one rank: the sum has it once
        y = self.method.apply(x, bias, tail=tail) if before is None else self.method.apply_activated(before, x, bias)
        return self.tp.all_reduce(y) if reduce and self.tp.size > 1 else y

    def onto(
        self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None,
        before: Activation | None = None,
    ) -> Summands:  # fmt: skip
        """`forward`, and the residual to add it to. May overwrite `residual`."""
        adds = before is None and len(x) >= self.method.adds_from and self.adds_to(residual.dtype, x.dtype)
        if self.tp.size == 1:
            if adds:
                return self.method.apply_onto(residual, x, tail), None
            if before is not None:
                return self.method.apply_activated(before, x, self.bias), residual
            return self.method.apply(x, self.bias, tail=tail), residual
        if self.tp.overlaps(x):
            halves = in_halves(residual, x, tail)
            return arriving((self.summand_onto(*rows, adds=adds, before=before) for rows in halves), self.tp)
        y, rest = self.summand_onto(residual, x, tail, adds=adds, before=before)
        return (self.tp.all_reduce(y), None) if rest is None else (summed_later(y, self.tp), rest)

    def adds_to(self, residual: torch.dtype, x: torch.dtype) -> bool:
        """Whether a product of `adds_from` tokens or more adds the residual itself."""
        return self.adds and self.bias is None and residual == x

    def summand_onto(
        self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None, *, adds: bool,
        before: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """This rank's summand, and the residual to add the sum to; None if it `adds` that."""
        first = self.tp.rank == 0  # of bias and residual, so that the sum has them once
        if before is not None:
            return self.method.apply_activated(before, x, self.bias if first else None), residual
        if not adds:
            return self.method.apply(x, self.bias if first else None, tail=tail), residual
        if first:
            return self.method.apply_onto(residual, x, tail), None
        self.method.apply_into(residual, x if tail is None else side_by_side(x, tail), None)
        return residual, None

    def targets(self, key: str, name: str, *, scale: float = 1.0) -> CheckpointMap:
        """Targets of `key`.weight (and .bias), which reads segment `name`. `scale`: factor of its
        output."""
        found = self.method.targets(key, [self._part([name], name, scale)])
        if self.bias is not None and self.segments[name].bias:
            piece = Piece(f"{self.name}.{name}.bias", self.bias.data, unchanged, scale, accumulate=True)
            found[f"{key}.bias"] = (piece,)
        return found


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

    def forward(self, norm: "RMSNorm", x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        """MLP of norm(x + residual), and x + residual. `batch` is only for experts."""
        if isinstance(x, Arriving):
            adds = self.down.adds_to(x.dtype if residual is None else residual.dtype, x.dtype)
            adds = adds and len(x) >= self.down.method.adds_from
            pieces = (self._normed(norm, *piece) for piece in x.with_rows(residual))
            summands = (self.down.summand_onto(rest, h, adds=adds, before=before) for h, rest, before in pieces)
            return arriving(summands, self.down.tp)
        h, residual, before = self._normed(norm, x, residual)
        return self.down.onto(residual, h, before=before)

    def _normed(
        self, norm: "RMSNorm", x: Hidden, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Activation | None]:
        """The input of `down`, x + residual, and the activation that `down` is to apply first."""
        own, before = self._activations(len(x)) if self.down.method.activates else (self.activation, None)
        h, residual = self.up.method.apply_normed(norm, x, residual, self.up.bias, own)
        return h if self.limit is None else clamped_silu_and_mul(h, self.limit), residual, before

    def _activations(self, tokens: int) -> tuple[Activation | None, Activation | None]:
        """That of the product `up`, and the one before the product `down`, which can have it: one of them is None."""
        activation = self.activation
        early = activation is None or self.up.method.fuses_activation(tokens, activation)
        return (activation, None) if early else (None, activation)

    def summand(self, x: torch.Tensor, reduce: bool = False) -> torch.Tensor:
        """MLP of x, [T, hidden] to [T, hidden]. `reduce` as in RowLinear."""
        own, before = self._activations(len(x)) if self.down.method.activates else (self.activation, None)
        h = self.up(x, own)
        h = h if self.limit is None else clamped_silu_and_mul(h, self.limit)
        return self.down(h, reduce=reduce, before=before)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        gate, down = self.scales
        found = self.down.targets(f"{key}.down_proj", "x", scale=down)
        for part in self.up.segments:
            scale = {part: gate if part == "gate" else 1.0}
            found |= self.up.targets(f"{key}.{part}_proj", [part], scale=scale, bias_scale=scale)
        return found


class VocabParallelEmbedding(nn.Module):
    """Equal shards of the vocabulary's rows, the last one padded with zeros.

    Args:
        multiplier: scales the embedding at run time, because a tied head needs the same weight unscaled.
        looks_up: False for a head that is not tied: its weight is only multiplied.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        build: Build,
        multiplier: float = 1.0,
        looks_up: bool = True,
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self.tp, self.multiplier = name, vocab_size, build.tp, multiplier
        self.rows = -(-vocab_size // self.tp.size)
        self.dtype = build.dtype
        self.method = make_linear(build, name, {"rows": self.rows}, hidden_size, 0)
        self.method.looks_up = looks_up
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
        local = self.method.apply(x, None)
        return (local if self.tp.size == 1 else self.tp.all_gather_last(local))[:, : self.vocab_size]

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
