"""How checkpoint tensors land in parameters: each key has one target, each target fills named pieces exactly once."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from hybridrt.base.errors import CheckpointError
from hybridrt.collectives.groups import TPGroup


@dataclass(frozen=True)
class Build:
    """What a layer is made for: its tensor-parallel rank, its numbers and its device.

    Attributes:
        scheme: from the names of a layer and of a segment ("experts" for a stack of them) to the name of the method
            that holds its weight (hybridrt.layers.methods).
    """

    tp: TPGroup
    dtype: torch.dtype
    device: torch.device
    scheme: Callable[[str, str], str] = lambda layer, segment: "dense"

    @property
    def uncut(self) -> "Build":
        """The same for a layer that every rank has whole."""
        return replace(self, tp=TPGroup())


Transform = Callable[[torch.Tensor], torch.Tensor]


def unchanged(t: torch.Tensor) -> torch.Tensor:
    """The Transform that changes nothing."""
    return t


# A part of a checkpoint's tensor: the key that it would have as a tensor of its own, and how it is taken.
TensorPart = tuple[str, Transform]
# Other numbers, integers or float8, mean nothing without their scales, and nothing here multiplies by these.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str, dummy: str = "normal") -> nn.Parameter:
    """An uninitialised parameter; `dummy` says how load_format="dummy" fills it (`fill_dummy`)."""
    param = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
    param.dummy = dummy  # type: ignore[attr-defined]
    return param


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that one checkpoint tensor (or a slice of it) fills.

    Attributes:
        name: unique within the model; the loader checks that each piece is filled exactly once.
        dest: the view to fill.
        select: takes the whole checkpoint tensor to this rank's part of it, in dest's shape.
        scale: multiplier (mu-P and the like) applied in float32 before rounding to the parameter's dtype.
        accumulate: add to dest instead of writing: biases that one merged output shares.
        dtypes: what the checkpoint's tensor may hold.
    """

    name: str
    dest: torch.Tensor
    select: Transform
    scale: float = 1.0
    accumulate: bool = False
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES

    def fill(self, key: str, tensor: torch.Tensor, part: Transform = unchanged) -> None:
        """Copies from a part of a tensor (scaled, in dest's dtype); CheckpointError if shapes disagree or the dtype is
        not one of `dtypes`."""
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
    """The target of a tensor that fills one parameter (or view) by itself."""
    return (Piece(name, dest, select, scale),)


def sharded(tp: TPGroup, name: str, dest: torch.Tensor, select: Transform = unchanged) -> CheckpointTarget:
    """A target that is this rank's shard of what `select` makes of a tensor, cut along its first dimension."""
    return whole(name, dest, lambda t: tp.shard(select(t), 0))
