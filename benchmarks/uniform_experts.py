"""Experts that tokens pick uniformly, as the floor of a decode step assumes.

With random weights the rows of a batch have similar hidden states, so they share experts, and a step reads fewer
weights than `hybridrt.bench.floor.step_bytes` counts.
"""

from typing import Any

import torch
from torch import Tensor

from hybridrt.layers import moe

ROUTERS = ("router_softmax", "router_sigmoid_grouped")


def pick_uniformly(tokens: int) -> None:
    """Routers of this process choose by random numbers instead of their logits, from now on: call it before a model is
    built. Products and choices take as long as before.

    Args:
        tokens: the most of any step. Token i of a step has the same numbers in all layers.

    A step with more raises ValueError.
    """
    numbers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def random(logits: Tensor) -> Tensor:
        if len(logits) > tokens:
            raise ValueError(f"a step has {len(logits)} tokens; pick_uniformly was told of at most {tokens}")
        key = logits.shape[1], logits.dtype, logits.device
        if key not in numbers:
            drawn = torch.randn(tokens, logits.shape[1], generator=torch.Generator().manual_seed(0))
            numbers[key] = drawn.to(logits)
        return numbers[key][: len(logits)]

    for name in ROUTERS:
        _replace(name, getattr(moe, name), random)


def _replace(name: str, router: Any, random: Any) -> None:
    def uniform(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        chosen: tuple[Tensor, Tensor] = router(random(logits), *args)
        return chosen

    setattr(moe, name, uniform)
