"""How checkpoint tensors fill parameters, and the interface of methods that store and multiply them.

A key has one target, which fills named pieces once. A method owns its parameters and names the
checkpoint tensors that fill them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from hybridrt.base.errors import BackendError, CheckpointError
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation
from hybridrt.layers.summands import Hidden

if TYPE_CHECKING:
    from hybridrt.layers.norm import RMSNorm


@dataclass(frozen=True)
class Build:
    """What layers are built for: rank, dtype and device.

    Attributes:
        scheme: "layer.segment" -> how the checkpoint stores that part of the layer's weight. Parts
            of experts are "layer.expert.matrix".
        quantised: the checkpoint is quantised. Shared experts are then apart from routed ones that
            are stored otherwise.
        expert_parallel: each rank holds whole routed experts, instead of a part of each.
        kv_codes: dtype of the KV cache's codes; None: it holds plain numbers in `dtype`.
    """

    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    scheme: Callable[[str], Scheme] = lambda part: PLAIN
    quantised: bool = False
    expert_parallel: bool = False
    kv_codes: torch.dtype | None = None

    @property
    def uncut(self) -> "Build":
        """This build without tensor parallelism."""
        return replace(self, tp=TPGroup(), expert_parallel=False)

    @property
    def shared_apart(self) -> bool:
        """Whether shared experts may be no experts of the routed ones' stack."""
        return self.quantised or self.expert_parallel


Transform = Callable[[torch.Tensor], torch.Tensor]


def unchanged(t: torch.Tensor) -> torch.Tensor:
    """The identity Transform."""
    return t


# The part's own key, and how to select it.
TensorPart = tuple[str, Transform]
# Integers and float8 need scales, which dense weights do not apply.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def parameter(
    *shape: int, dtype: torch.dtype, device: torch.device | str, dummy: str | float = "normal"
) -> nn.Parameter:
    """An uninitialised parameter. `dummy`: how load_format="dummy" fills it (`fill_dummy`)."""
    param = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
    param.dummy = dummy  # type: ignore[attr-defined]
    return param


@dataclass(frozen=True)
class Piece:
    """A part of a parameter, filled by one checkpoint tensor or a slice of it.

    Attributes:
        name: unique in the model. The loader checks that each piece is filled exactly once.
        dest: the view to fill.
        select: takes the whole checkpoint tensor to this rank's part, in dest's shape.
        scale: multiplier (mu-P and others), applied in float32 before rounding.
        accumulate: add to dest, for biases that share a merged output.
        dtypes: allowed in the checkpoint.
    """

    name: str
    dest: torch.Tensor
    select: Transform
    scale: float = 1.0
    accumulate: bool = False
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES

    def fill(self, key: str, tensor: torch.Tensor, part: Transform = unchanged) -> None:
        """Copies a part of a tensor, scaled. CheckpointError if its shape or dtype does not fit."""
        if tensor.dtype not in self.dtypes:
            wanted = (
                "bfloat16, float16 or float32" if self.dtypes is WEIGHT_DTYPES else " or ".join(map(str, self.dtypes))
            )
            raise CheckpointError(
                f"{key} holds {tensor.dtype}, and {self.name} takes {wanted}; a quantised matrix needs scales next to "
                "it, and a quantization_config that says what they are"
            )
        try:
            taken = self.select(part(tensor))
        except (RuntimeError, IndexError) as e:
            raise CheckpointError(f"{key}: shape {tuple(tensor.shape)} does not suit {self.name}: {e}") from e
        if taken.shape != self.dest.shape:
            raise CheckpointError(
                f"{key}: {self.name} takes shape {tuple(self.dest.shape)}, the checkpoint's {tuple(tensor.shape)} "
                f"gives {tuple(taken.shape)}; config.json and weights do not belong together"
            )
        if self.scale != 1.0:
            taken = taken.float() * self.scale
        if self.accumulate:
            self.dest.add_(taken.to(self.dest.device, torch.float32).to(self.dest.dtype))
        else:
            self.dest.copy_(taken)


# Also pieces of quantised matrices (hybridrt.layers.quant.pieces), which have other arguments. (): another rank's.
CheckpointTarget = tuple[Any, ...]
CheckpointMap = dict[str, CheckpointTarget]


def whole(name: str, dest: torch.Tensor, select: Transform = unchanged, scale: float = 1.0) -> CheckpointTarget:
    """The target of a tensor that fills one parameter (or view)."""
    return (Piece(name, dest, select, scale),)


def sharded(tp: TPGroup, name: str, dest: torch.Tensor, select: Transform = unchanged) -> CheckpointTarget:
    """This rank's shard of `select(tensor)`, along its first dimension."""
    return whole(name, dest, lambda t: tp.shard(select(t), 0))


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
        name: of the layer, for errors.
        count: E. rows: rows of up: `size`, or twice as many, with the gate first.
        up, down: how the checkpoint stores the matrices.
    """

    @abstractmethod
    def __init__(
        self, name: str, count: int, rows: int, in_features: int, size: int, build: Build, up: Scheme = PLAIN,
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
    """A weight [out, in] and its products. Products that a method does not fuse have defaults.

    Args:
        scheme: how the checkpoint stores it.
        parts: rows of the matrices that are merged in it; (): it is one.

    Attributes:
        experts: class for stacks of experts, or None.
        merges_inputs: one weight may hold several matrices along the input. False if a scale serves
            a whole row, because each matrix has its own.
        looks_up: an embedding calls `lookup`, maybe one that is the head, too.
        adds_from: tokens from which to add a residual of x's dtype in the product (`apply_onto`).
        activates: it takes numbers to which an activation is still to be applied, without a launch for that
            (`apply_activated`).
    """

    experts: ClassVar[type[ExpertsMethod] | None] = None
    merges_inputs: ClassVar[bool] = False
    adds_from: ClassVar[float] = inf
    looks_up: bool = False
    activates: bool = False

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

    def fuses_activation(self, tokens: int, activation: Activation) -> bool:
        """Whether `apply` and `apply_normed` of so many tokens spend no launch on the activation. False leaves it to
        the next product, if its method `activates`."""
        return False

    def apply_activated(self, before: Activation, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """before(x) W^T + b."""
        return self.apply(ACTIVATIONS[before](x), bias)

    def joined(self, others: Sequence["LinearMethod"]) -> "LinearMethod | None":
        """One method for this weight and the others' side by side along the input, once all are complete; None if
        there is none."""
        return None

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
        self, norm: "RMSNorm", x: Hidden, residual: torch.Tensor | None, bias: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(act(norm(x + residual) W^T + b), x + residual), without a residual as in `norm`."""
        h, residual = norm(x, residual)
        return self.apply(h, bias, activation), residual

    def apply_each(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Products [T, out / n] of n inputs [T, in] with n equal parts of the rows."""
        return [self.apply(x, None).chunk(len(inputs), -1)[i] for i, x in enumerate(inputs)]
