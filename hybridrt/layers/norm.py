"""RMS norms with float32 weights, and the stack of normed parts that add to a residual.

In bfloat16 a zero-centred (1 + w) would lose bits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.dense.gated_norm import GATE_ACTIVATIONS, GateActivation, gated_rms_norm
from hybridrt.kernels.dense.norm_activation import add_rms_norm, rms_norm
from hybridrt.layers.linear import RowLinear
from hybridrt.layers.summands import Hidden, Summands, summed
from hybridrt.layers.weights import Build, CheckpointMap, CheckpointTarget, parameter, whole


class RMSNorm(nn.Module):
    """x / rms(x) * w over the last dimension (Zhang & Sennrich 2019).

    Args:
        zero_centered: the checkpoint stores w - 1 (Qwen3-Next).
        scale: multiplier of the output, applied to w.
        learned: False: w = 1, in no checkpoint.

    Attributes:
        add: `add_rms_norm` on this device, for a product that reads weight and eps itself.
    """

    weight: torch.Tensor

    def __init__(
        self, name: str, size: int, eps: float, *, device: torch.device, zero_centered: bool = False,
        scale: float = 1.0, learned: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.eps, self.zero_centered, self.scale, self.learned = name, eps, zero_centered, scale, learned
        if learned:
            self.weight = parameter(size, dtype=torch.float32, device=device, dummy="ones")
        else:
            self.register_buffer("weight", torch.ones(size, dtype=torch.float32, device=device))
        self._norm, self.add = rms_norm.for_device(device), add_rms_norm.for_device(device)

    def forward(self, x: Hidden, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x)."""
        if not isinstance(x, torch.Tensor):
            return x.normed(self, residual)
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        return self.add(x, residual, self.weight, self.eps)

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        if not self.learned:
            return {}
        offset = 1.0 if self.zero_centered else 0.0
        return {
            f"{key}.weight": whole(f"{self.name}.weight", self.weight.data, lambda t: t.float() + offset, self.scale)
        }


class SharedRMSNorm(RMSNorm):
    """RMS norm of a vector of `size` numbers that is cut into `shards`. tp.size / shards ranks hold the
    same one. Takes no residual if there are several."""

    def __init__(self, name: str, size: int, eps: float, *, shards: int, build: Build) -> None:
        super().__init__(name, size // shards, eps, device=build.device)
        self.tp, self.size, self.shards = build.tp, size, shards

    def forward(self, x: Hidden, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = summed(x)
        if self.shards == 1:
            return super().forward(x, residual)
        assert residual is None, "a norm over several ranks takes no residual"
        h = x.float()
        copies = self.tp.size // self.shards
        squares = self.tp.all_reduce(h.square().sum(-1, keepdim=True)) / copies
        return (h * torch.rsqrt(squares / self.size + self.eps) * self.weight).to(x.dtype), x

    def targets(self, key: str) -> dict[str, CheckpointTarget]:
        (target,) = super().targets(key).values()
        select = target[0].select
        return {f"{key}.weight": (replace(target[0], select=lambda t: self.tp.shard(select(t), 0, self.shards)),)}


class GatedRMSNorm(nn.Module):
    """RMS norm in groups with a gate, before or after it (Mamba-2, GDN, KDA).

    Args:
        size: width on this rank. `group_size` divides it, or is the width over all ranks.
        activation: activation of the gate.
    """

    def __init__(
        self, size: int, eps: float, *, group_size: int, norm_before_gate: bool,
        activation: GateActivation = "silu", build: Build,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation: GateActivation = activation
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.tp, self.spans_ranks = build.tp, group_size > size
        self.weight = parameter(size, dtype=torch.float32, device=build.device, dummy="ones")

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [T, size] to [T, size]."""
        if self.spans_ranks:
            return self._across_ranks(x, gate)
        return gated_rms_norm(
            x, gate, self.weight, self.eps, group_size=self.group_size, norm_before_gate=self.norm_before_gate,
            activation=self.activation,
        )  # fmt: skip

    def _across_ranks(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """One group over all ranks, which sum their squares."""
        gating = GATE_ACTIVATIONS[self.activation](gate.float())
        h = x.float() if self.norm_before_gate else x.float() * gating
        squares = self.tp.all_reduce(h.square().sum(-1, keepdim=True))
        h = h * torch.rsqrt(squares / self.group_size + self.eps) * self.weight
        return (h * gating if self.norm_before_gate else h).to(x.dtype)


class LayerPart(Protocol):
    """A module of a layer, which adds to x + residual. It returns what it adds and that sum, or all
    of it and None."""

    def __call__(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch, /) -> Summands: ...

    def targets(self, key: str, /) -> CheckpointMap:
        """Targets of its checkpoint tensors, under `key`."""

    def modules(self) -> Iterator[nn.Module]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True)
class ResidualPart:
    """One norm and its part.

    Attributes:
        norm_key, key: checkpoint keys of norm and part, below the layer's; "" if the part's keys
            are directly below it.
        post_key: of a second norm, of what the part adds; "" if there is none.
    """

    norm_key: str
    key: str
    part: LayerPart
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

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
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
        self._short: list[tuple[RMSNorm, LayerPart]] | None = None
        self._between: tuple[frozenset[int], Callable[[], None]] | None = None
        for i, (name, parts) in enumerate(layers.items()):
            for each in parts:
                self.norms.append(RMSNorm(f"{name}.{each.norm_key}", hidden_size, **norm))
                if each.post_key:
                    self.parts.append(Sandwich(each, RMSNorm(f"{name}.{each.post_key}", hidden_size, **norm)))
                else:
                    self.parts.append(cast(nn.Module, each.part))
                self.keys.append((i, each.norm_key, "" if each.post_key else each.key))

    def __iter__(self) -> Iterator[tuple[RMSNorm, LayerPart]]:
        """Yields (norm, part). A model calls the part itself, which saves a Python frame each."""
        parts: Any = zip(self.norms, self.parts) if self._short is None else self._short
        return iter(parts) if self._between is None else self._with_calls(parts, *self._between)

    @staticmethod
    def _with_calls(
        parts: Iterable[tuple[RMSNorm, LayerPart]], places: frozenset[int], call: Callable[[], None]
    ) -> Iterator[tuple[RMSNorm, LayerPart]]:
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
        """The recurrent layers' mixers by layer id."""
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
