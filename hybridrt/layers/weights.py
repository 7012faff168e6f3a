"""How checkpoint tensors fill parameters: a key has one target, which fills named pieces once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybridrt.base.errors import CheckpointError
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.collectives.groups import TPGroup


@dataclass(frozen=True)
class Build:
    """What layers are built for: rank, dtype and device.

    Attributes:
        scheme: "layer.segment" -> how the checkpoint stores that part of the layer's weight. Parts
            of experts are "layer.expert.matrix".
        quantised: the checkpoint is quantised. Shared experts are then apart from routed ones, which
            may be stored otherwise.
    """

    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    scheme: Callable[[str], Scheme] = lambda part: PLAIN
    quantised: bool = False

    @property
    def uncut(self) -> "Build":
        """The same without tensor parallelism."""
        return replace(self, tp=TPGroup())


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


# Also pieces of quantised matrices (hybridrt.layers.quant.pieces), which have other arguments.
CheckpointTarget = tuple[Any, ...]
CheckpointMap = dict[str, CheckpointTarget]


def whole(name: str, dest: torch.Tensor, select: Transform = unchanged, scale: float = 1.0) -> CheckpointTarget:
    """The target of a tensor that fills one parameter (or view)."""
    return (Piece(name, dest, select, scale),)


def sharded(tp: TPGroup, name: str, dest: torch.Tensor, select: Transform = unchanged) -> CheckpointTarget:
    """This rank's shard of `select(tensor)`, along its first dimension."""
    return whole(name, dest, lambda t: tp.shard(select(t), 0))
