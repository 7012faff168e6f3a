"""The layers of a decoder: normed parts that add to a residual."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.layers.linear import RowLinear, Summands
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import CheckpointMap


@dataclass(frozen=True)
class ResidualPart:
    """One norm and its part.

    Attributes:
        norm_key, key: checkpoint keys of norm and part, below the layer's; "" if the part's keys
            are directly below it.
        part: a module with `targets(key)`, and with `forward(norm, x, residual, batch)`, which
            returns what it adds to x + residual, and that sum.
        post_key: of a second norm, of what the part adds; "" if there is none.
    """

    norm_key: str
    key: str
    part: Any
    post_key: str = ""


class Sandwich(nn.Module):
    """A part between two norms:  x ─ norm ─ part ─ norm ─ +

    Args:
        each: the part and its keys.
        post: the second norm.
    """

    def __init__(self, each: ResidualPart, post: RMSNorm) -> None:
        super().__init__()
        self.part, self.post, self.key, self.post_key = each.part, post, each.key, each.post_key
        for module in self.part.modules():
            if isinstance(module, RowLinear):
                module.adds = False

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        added, residual = self.part(norm, x, residual, batch)
        return self.post(added)[0], residual

    def targets(self, layer: str) -> CheckpointMap:
        """`layer`: the layer's key, because the norm's is directly below it."""
        part_key = f"{layer}.{self.key}" if self.key else layer
        return {**self.part.targets(part_key), **self.post.targets(f"{layer}.{self.post_key}")}


class ResidualStack(nn.Module):
    """Layers of parts:  x ─ norm ─ part ─ + ─ norm ─ part ─ + ...  A part may have a second norm.

    Args:
        layers: parts by layer name, which prefixes the names of pieces.
        norm: further arguments of the RMS norms: eps, device, zero_centered.
    """

    def __init__(self, layers: dict[str, Sequence[ResidualPart]], hidden_size: int, **norm: Any) -> None:
        super().__init__()
        self.norms, self.parts = nn.ModuleList(), nn.ModuleList()
        self.keys: list[tuple[int, str, str]] = []  # each part's layer, its norm's key, its own key
        self._short: list[tuple[RMSNorm, Any]] | None = None
        self._between: tuple[frozenset[int], Callable[[], None]] | None = None
        for i, (name, parts) in enumerate(layers.items()):
            for each in parts:
                self.norms.append(RMSNorm(f"{name}.{each.norm_key}", hidden_size, **norm))
                if each.post_key:
                    self.parts.append(Sandwich(each, RMSNorm(f"{name}.{each.post_key}", hidden_size, **norm)))
                else:
                    self.parts.append(each.part)
                self.keys.append((i, each.norm_key, "" if each.post_key else each.key))

    def __iter__(self) -> Iterator[tuple[RMSNorm, Any]]:
        """Yields (norm, part). A model calls the part itself, which saves a Python frame each."""
        parts: Any = zip(self.norms, self.parts) if self._short is None else self._short
        return iter(parts) if self._between is None else self._with_calls(parts, *self._between)

    @staticmethod
    def _with_calls(parts: Any, places: frozenset[int], call: Callable[[], None]) -> Iterator[tuple[RMSNorm, Any]]:
        for i, part in enumerate(parts):
            if i in places:
                call()
            yield part

    @contextmanager
    def calling(self, places: Iterable[int], call: Callable[[], None]) -> Iterator[None]:
        """In this context, iteration calls `call` before the parts of these indices."""
        self._between = frozenset(places), call
        try:
            yield
        finally:
            self._between = None

    @contextmanager
    def shortened(self, sorts: Sequence[Any]) -> Iterator[None]:
        """In this context, iteration gives two parts of each sort. Two launch all kernels of the
        sort: the first part of a model has no residual to add to, and launches another norm.

        Args:
            sorts: a sort for each layer. Equal sorts have equal part types and weight shapes.
        """
        counts, kept = Counter[str](), []
        parts: Any = zip(self.keys, self.norms, self.parts)
        for (i, _, _), norm, part in parts:
            shapes = [(name, tuple(p.shape), p.dtype) for name, p in part.named_parameters()]
            sort = repr((type(part), shapes, sorts[i]))
            counts[sort] += 1
            if counts[sort] <= 2:
                kept.append((norm, part))
        self._short = kept
        try:
            yield
        finally:
            self._short = None

    def mixers(self) -> dict[int, Any]:
        found: list[Any] = [module for module in self.modules() if hasattr(module, "kind")]
        return {mixer.layer_id: mixer for mixer in found}

    def targets(self, key: str) -> CheckpointMap:
        found: CheckpointMap = {}
        parts: Any = zip(self.keys, self.norms, self.parts, strict=True)
        for (i, norm_key, part_key), norm, part in parts:
            layer = f"{key}.{i}"
            found |= norm.targets(f"{layer}.{norm_key}")
            found |= part.targets(f"{layer}.{part_key}" if part_key else layer)
        return found
