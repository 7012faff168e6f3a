"""Recuts copied prefixes from one number of ranks to another: `prefix_copy` stores what each rank holds.

Each part of a tensor is cut over the ranks by itself: KV heads, each sub-projection of a conv, and the
first dimension of a recurrent state. Where pieces are fewer than ranks, neighbours hold the same one.
"""

import torch
from torch import Tensor

from hybridrt.base.model_config import ModelConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.attention import attention_spec
from hybridrt.mem_cache.pools.mamba_pool_spec import Shapes
from hybridrt.runtime.run.prefix_copy import Tensors


class PrefixCut:
    """How the tensors of `prefix_shapes` are cut over any number of ranks."""

    def __init__(self, model: ModelConfig, ranks: int) -> None:
        self._model, self._ranks = model, ranks

    def shapes(self, shapes: Shapes, ranks: int) -> Shapes:
        """The shapes of the tensors over `ranks` ranks. ConfigError if so many cannot share the model."""
        found = dict(shapes)
        for name, (shape, dtype) in shapes.items():
            dim, cut = _dim(name), list(shape)
            cut[0], cut[dim] = ranks, sum(self.widths(name, ranks))
            found[name] = tuple(cut), dtype
        return found

    def recut(self, tensors: Tensors) -> dict[str, Tensor]:
        """Tensors of any number of ranks, for this one's."""
        return {name: self._recut(name, tensor) for name, tensor in tensors.items()}

    def _recut(self, name: str, tensor: Tensor) -> Tensor:
        theirs, ranks, dim = len(tensor), self._ranks, _dim(name)
        if theirs == ranks:
            return tensor
        whole, ours = self.widths(name, 1), self.widths(name, ranks)
        if not sum(whole):
            return tensor[:1].expand(ranks, *tensor.shape[1:]).contiguous()
        parts = tensor.split(self.widths(name, theirs), dim)
        return torch.cat([_recut_part(*each, ranks, dim) for each in zip(parts, whole, ours, strict=True)], dim)

    def widths(self, name: str, ranks: int) -> list[int]:
        """Widths of the parts of a tensor on one of `ranks` ranks, along the dimension that is cut."""
        fields = name.split(".")
        layer_id, what = int(fields[-2]), fields[-1]
        if what in ("keys", "values"):
            spec = attention_spec(self._model.attention_of(layer_id), TPGroup(size=ranks), self._model.dtype)
            return [spec.num_kv_heads]
        kind = self._model.layer(layer_id).linear
        assert kind is not None, f"layer {layer_id} keeps a state"
        shape = state_shape(self._model.linear[kind], ranks)
        return [width for _, width in shape.segments] if what == "conv" else [shape.temporal[0]]


def _dim(name: str) -> int:
    """The dimension that is cut, of [ranks, tokens, heads, ...] or [ranks, ...]."""
    return 2 if name.endswith((".keys", ".values")) else 1


def _recut_part(part: Tensor, whole: int, ours: int, ranks: int, dim: int) -> Tensor:
    """[their ranks, ...] to [ranks, ...], of a part that has `whole` along `dim`, and `ours` on each rank."""
    held_by = len(part) * part.shape[dim] // whole  # so many neighbours
    pieces = torch.cat(list(part[::held_by]), dim - 1).split(ours, dim - 1)
    return torch.stack([pieces[rank * len(pieces) // ranks] for rank in range(ranks)])
