"""A trial: random tensors of one launch's shape, with which its candidates run. Nothing live is touched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True)
class Trial:
    """Calls of an operation that launch with the choice in question.

    Attributes:
        calls: timed one after the other. Weights of each call are apart in memory, so that none is in a cache.
        outputs: runs once and returns what it computed.
        reference: the same by the plain implementation, in float32.
    """

    calls: Sequence[Call]
    outputs: Callable[[], Sequence[Tensor]]
    reference: Callable[[], Sequence[Tensor]]


MakeTrial = Callable[[Any, torch.device], Trial]


def normal(device: torch.device, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal random numbers, equal in each call. Made on the device in float32."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)


def error_of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative error of the tensors, by their norms; infinite if a number is not finite."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        size = float(other.double().norm()) or 1.0
        error = float((one.double() - other.double()).norm()) / size
        worst = max(worst, error if error == error else float("inf"))
    return worst


def same_bits(found: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal."""
    return all(torch.equal(one, other) for one, other in zip(found, others, strict=True))
