"""How linear layers and experts store weights and compute: the protocol, and dense weights.

A method owns its parameters and names the checkpoint tensors that fill them. Packages add methods
by entry points of `hybridrt.linear_methods`, "name = module:class".
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.errors import BackendError
from hybridrt.base.plugins import Plugins
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.kernels.dense.linear import ONEDNN_FROM, add_linear, linear, stored_by_columns
from hybridrt.kernels.dense.moe import ExpertStack, fused_experts
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, InputNorm, is_skinny, skinny_linear
from hybridrt.layers.weights import Build, CheckpointMap, Piece, Transform, parameter

if TYPE_CHECKING:
    from hybridrt.layers.norm import RMSNorm

SKINNY_ON = ("cuda",)


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint matrix that fills a segment.

    Attributes:
        name: prefix of piece names, unique in the model.
        dim: the weight's segments are rows (0, outputs) or columns (1, inputs).
        start, size: place of the segment in the weight, along `dim`.
        select: takes a checkpoint tensor with the matrix's rows (columns) at `dim` to this rank's.
            A list of their numbers, too: so a method learns which ones this rank has.
        total: the matrix's rows (columns).
        scale: multiplier of the matrix. The method chooses the numbers to multiply.
    """

    name: str
    dim: int
    start: int
    size: int
    select: Transform
    total: int
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertPart:
    """`matrix` of experts `first` to `first + count`; of "up" the rows `start` to `start + size`.

    Attributes:
        select: takes the checkpoint's matrix to this rank's [count, ...], as in the stack.
        total: rows of the checkpoint's matrix of "up", columns of that of "down".
        scale: multiplier.
    """

    name: str
    matrix: Literal["up", "down"]
    first: int
    count: int
    start: int
    size: int
    select: Transform
    total: int
    scale: float = 1.0


class Method:
    """Owns parameters as attributes. Its layer registers them under their names."""

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in vars(self).items() if isinstance(value, nn.Parameter)}

    def finish(self) -> None:
        """Called once all tensors are there: a method may store them in another way."""


class ExpertsMethod(Method, ABC):
    """A stack of experts: up [E, rows, in], down [E, in, size].

    Args:
        count: E. rows: rows of up: `size`, or twice as many, with the gate first.
        up, down: how the checkpoint stores the matrices.
    """

    @abstractmethod
    def __init__(
        self, count: int, rows: int, in_features: int, size: int, build: Build, up: Scheme = PLAIN,
        down: Scheme = PLAIN,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def targets(self, key: str, part: ExpertPart) -> CheckpointMap:
        """Targets of the tensors under `key` (`key`.weight, scales, ...)."""

    @abstractmethod
    def apply(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, activation: Literal["silu", "relu2"],
        limit: float | None = None, alpha: float | None = None,
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[T, in] to this rank's part of [T, in]. weights, ids [T, k] as in `fused_experts`, the
        others as in ExpertStack; biases of up and down. Without that of down another rank adds
        it."""


class LinearMethod(Method, ABC):
    """A weight [out, in] and its products. Products that a method does not fuse have defaults. On a
    CPU, wrap non-torch kernels and host reads of step values in `kernels.core.recording.live`:
    recordings call these anew.

    Args:
        scheme: how the checkpoint stores it.
        parts: rows of the matrices that are merged in it; (): it is one.

    Attributes:
        experts: class for stacks of experts, or None.
        merges_inputs: one weight may hold several matrices along the input. False if a scale serves
            a whole row, because each matrix has its own.
        adds_from: tokens from which to add a residual of x's dtype in the product (`apply_onto`).
    """

    experts: ClassVar[type[ExpertsMethod] | None] = None
    merges_inputs: ClassVar[bool] = False
    adds_from: ClassVar[float] = inf

    @abstractmethod
    def __init__(
        self, out_features: int, in_features: int, build: Build, scheme: Scheme = PLAIN, parts: Sequence[int] = ()
    ) -> None: ...

    @abstractmethod
    def targets(self, key: str, parts: Sequence[Part]) -> CheckpointMap:
        """Targets of the tensors under `key` (`key`.weight, scales, ...)."""

    @abstractmethod
    def apply(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None = None,
        tail: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """act(x W^T + b), [T, in]; the last columns of x may be in `tail`."""

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [T] as [T, in] of `dtype`, for embeddings."""
        raise BackendError(f"{type(self).__name__} serves no embeddings; leave the embedding dense")

    def apply_into(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """x W^T + b into `out` [T, out], maybe columns of a wider tensor."""
        out.copy_(self.apply(x, bias))

    def apply_onto(self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + residual, written to `residual`."""
        return residual.add_(self.apply(x, None, tail=tail))

    def apply_normed(
        self, norm: "RMSNorm", x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(act(norm(x + residual) W^T + b), x + residual), without a residual as in `norm`."""
        h, residual = norm(x, residual)
        return self.apply(h, bias, activation), residual

    def apply_each(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Products [T, out / n] of n inputs [T, in] with n equal parts of the rows."""
        return [self.apply(x, None).chunk(len(inputs), -1)[i] for i, x in enumerate(inputs)]


class DenseExperts(ExpertsMethod):
    def __init__(
        self, count: int, rows: int, in_features: int, size: int, build: Build, up: Scheme = PLAIN,
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
    """A weight in the model's dtype.

    On a GPU, a step of few tokens runs norm, product and activation as one kernel.
    """

    experts = DenseExperts
    merges_inputs = True
    adds_from = 1024  # the next norm then moves half the bytes

    def __init__(
        self, out_features: int, in_features: int, build: Build, scheme: Scheme = PLAIN, parts: Sequence[int] = ()
    ) -> None:
        self.weight = parameter(out_features, in_features, dtype=build.dtype, device=build.device)
        self.skinny = build.device.type in SKINNY_ON
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
        multiply = linear if x.shape[0] * self.weight.numel() >= ONEDNN_FROM else F.linear
        y = multiply(x, self.weight, bias)
        return y if activation is None else ACTIVATIONS[activation](y)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def apply_into(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        if is_skinny(x, self.weight, None) and out.is_contiguous():
            skinny_linear(x, self.weight, bias, out=out)
            return
        weight = self.weight.t()
        torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)

    def apply_onto(self, residual: torch.Tensor, x: torch.Tensor, tail: torch.Tensor | None = None) -> torch.Tensor:
        return add_linear(residual, x if tail is None else side_by_side(x, tail), self.weight)

    def apply_normed(
        self, norm: "RMSNorm", x: torch.Tensor, residual: torch.Tensor | None, bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if not self.skinny or not is_skinny(x, self.weight, activation):
            h, residual = norm(x, residual)
            return self.apply(h, bias, activation), residual
        before = InputNorm(norm.weight, norm.eps, residual)
        y, total = skinny_linear(x, self.weight, bias, norm=before, activation=activation)
        return y, x if total is None else total

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
_BUILT_IN = {"dense": f"{__name__}:DenseMethod", **_QUANT}
_METHODS = Plugins("hybridrt.linear_methods", _BUILT_IN, "method of linear layers", LinearMethod, classes=True)


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
    return kind(count, rows, in_features, size, build, up, down)


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
