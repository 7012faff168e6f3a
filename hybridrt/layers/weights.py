"""How checkpoint tensors fill parameters: a key has one target, which fills named pieces once."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from hybridrt.base.errors import CheckpointError
from hybridrt.collectives.groups import TPGroup


@dataclass(frozen=True)
class Build:
    """What layers are built for: rank, dtype and device.

    Attributes:
        scheme: (layer name, segment name or "experts") -> name of the weight's method
            (hybridrt.layers.linear).
    """

    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    scheme: Callable[[str, str], str] = lambda layer, segment: "dense"

    @property
    def uncut(self) -> "Build":
        """The same without tensor parallelism."""
        return replace(self, tp=TPGroup())


Transform = Callable[[torch.Tensor], torch.Tensor]


def unchanged(t: torch.Tensor) -> torch.Tensor:
    """The identity Transform."""
    return t


# A part of a tensor: the key that it would have alone, and how to select it.
TensorPart = tuple[str, Transform]
# Integers and float8 are refused: they need scales, which dense weights do not apply.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str, dummy: str = "normal") -> nn.Parameter:
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
                f"{key} holds {tensor.dtype}, and {self.name} takes {wanted}; quantised "
                "checkpoints are not supported, use the original one"
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


CheckpointTarget = tuple[Piece, ...]
CheckpointMap = dict[str, CheckpointTarget]


def whole(name: str, dest: torch.Tensor, select: Transform = unchanged, scale: float = 1.0) -> CheckpointTarget:
    """The target of a tensor that fills one parameter (or view)."""
    return (Piece(name, dest, select, scale),)


def sharded(tp: TPGroup, name: str, dest: torch.Tensor, select: Transform = unchanged) -> CheckpointTarget:
    """This rank's shard of `select(tensor)`, along its first dimension."""
    return whole(name, dest, lambda t: tp.shard(select(t), 0))
