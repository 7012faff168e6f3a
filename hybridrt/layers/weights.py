"""How checkpoint tensors land in parameters: each key has one target, each target fills named pieces exactly once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hybridrt.distributed.groups import TPGroup
from hybridrt.errors import CheckpointError


@dataclass(frozen=True)
class Build:
    """What a layer is made for: its tensor-parallel rank, its numbers and its device."""

    tp: TPGroup
    dtype: torch.dtype
    device: torch.device


Transform = Callable[[torch.Tensor], torch.Tensor]
# Other numbers, integers or float8, mean nothing without their scales, and nothing here multiplies by these.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DUMMY_FILLS = ("normal", "ones", "zeros", "decay", "dt_bias")


def parameter(*shape: int, dtype: torch.dtype, device: torch.device | str, dummy: str = "normal") -> nn.Parameter:
    """An uninitialised parameter; `dummy` says how load_format="dummy" fills it (DUMMY_FILLS)."""
    assert dummy in DUMMY_FILLS, dummy
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
    """

    name: str
    dest: torch.Tensor
    select: Transform
    scale: float = 1.0
    accumulate: bool = False

    def fill(self, key: str, tensor: torch.Tensor) -> None:
        """Copies (scaled, in dest's dtype); CheckpointError if shapes disagree or the dtype is not in WEIGHT_DTYPES."""
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{key} holds {tensor.dtype}, and {self.name} takes bfloat16, float16 or float32; quantised "
                "checkpoints are not supported, use the original one"
            )
        try:
            part = self.select(tensor)
        except (RuntimeError, IndexError) as e:
            raise CheckpointError(f"{key}: shape {tuple(tensor.shape)} does not suit {self.name}: {e}") from e
        if part.shape != self.dest.shape:
            raise CheckpointError(
                f"{key}: {self.name} takes shape {tuple(self.dest.shape)}, the checkpoint's {tuple(tensor.shape)} "
                f"gives {tuple(part.shape)}; config.json and weights do not belong together"
            )
        if self.scale != 1.0:
            part = part.float() * self.scale
        if self.accumulate:
            self.dest.add_(part.to(self.dest.device, torch.float32).to(self.dest.dtype))
        else:
            self.dest.copy_(part)


CheckpointTarget = tuple[Piece, ...]
CheckpointMap = dict[str, CheckpointTarget]


def whole(name: str, dest: torch.Tensor, select: Transform = lambda t: t, scale: float = 1.0) -> CheckpointTarget:
    """The target of a tensor that fills one parameter (or view) by itself."""
    return (Piece(name, dest, select, scale),)
