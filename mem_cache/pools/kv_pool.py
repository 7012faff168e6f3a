"""Keys and values of the softmax-attention layers, in pages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hybridrt.base.model_config import AttentionSpec
from hybridrt.mem_cache.pools.slab_memory import SlabMemory

# Layer ids by the spec that they share.
KVLayers = Mapping[AttentionSpec, Sequence[int]]


class KVScales(NamedTuple):
    """What the codes of a layer's keys and values are multiplied by. Latent vectors have one
    scale, that of keys."""

    keys: float = 1.0
    values: float = 1.0


LayerScales = Mapping[int, KVScales]
ONES: LayerScales = {}  # layers without an entry have scales of 1


class KVPool:
    """KV cache of the attention layers. Recurrent layers need no room here.

    Layers form page groups (`layer_groups`), which have pages of their own: a page of a group's
    allocator is a page in each of its layers. Page 0 is padding and stays zero. A token's KV is at
    page * page_size + offset.

    Args:
        layers: the model's attention layers.
        num_pages: pages that an allocator may hand out (1 to num_pages), for each group or one number
            for all.
        own_pages: further pages of each group, for a drafter.
        memory: the memory that the groups share, instead of `num_pages`; None: each tensor has
            its own.
        scales: of layers that keep codes (KV_CODES), by layer id.

    Attributes:
        scales: of all layers.
        windows: of each page group, in tokens; None for layers without a window, which come first.
            Several groups may have the same one.
        num_pages: of each page group, the highest page number, `own_pages` included.
        own: numbers of the drafter's pages, [own_pages] int32 for each group.
        tensors: for each spec its keys, then its values: [A, num_pages + 1, page_size, kv_heads,
            dim], A layers in the order of `layers`. Specs of variant "mla" have one tensor. Codes are
            bytes (uint8) here and in `held`, which torch moves on every device.
        tensor_groups: the page group of each of `tensors`.
        layer: keys and values of one layer by its id: [num_pages + 1, page_size, kv_heads, dim]
            each. The values of a latent cache are the first numbers of its keys.
    """

    def __init__(
        self, layers: KVLayers, *, num_pages: int | Sequence[int], page_size: int, device: torch.device | str,
        own_pages: int = 0, memory: SlabMemory | None = None, scales: LayerScales = ONES,
    ) -> None:  # fmt: skip
        self.page_size, self.device = page_size, torch.device(device)
        found = layer_groups(layers)
        self.windows = tuple([group.window for group in found])
        lent = (num_pages,) * len(self.windows) if isinstance(num_pages, int) else tuple(num_pages)
        if memory is None:
            self.num_pages = tuple([count + own_pages for count in lent])
            own = [[*range(count + 1, count + 1 + own_pages)] for count in lent]
        else:
            slabs = memory.plan
            self.num_pages = tuple([(slabs.total - 1) * share.apart + share.per_slab - 1 for share in slabs.groups])
            own = [slabs.own_numbers(group) for group in range(len(self.windows))]
        self.own = [np.array(numbers, np.int32) for numbers in own]
        self.specs = {layer_id: spec for spec, layer_ids in layers.items() for layer_id in layer_ids}
        self.scales = {
            layer_id: _scales(spec, scales.get(layer_id, KVScales())) for layer_id, spec in self.specs.items()
        }
        self.tensors: list[torch.Tensor] = []
        self.tensor_groups: list[int] = []
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        # Kernels of other libraries multiply masked values by zero, and 0 * NaN is NaN.
        make = partial(_zeros, torch.device(device)) if memory is None else memory.page_tensor
        for spec, layer_ids in layers.items():
            group = found.index(LayerGroup.of_spec(spec))
            shape = (len(layer_ids), self.num_pages[group] + 1, page_size, spec.num_kv_heads)
            held = [make(group, (*shape, dim), spec.stored_dtype) for dim in spec.cache_dims]
            self.tensors += held
            self.tensor_groups += [group] * len(held)
            self._layers |= {layer_id: tuple(t[i] for t in held) for i, layer_id in enumerate(layer_ids)}
        pairs = {i: _keys_and_values(self.specs[i], held) for i, held in self._layers.items()}
        self.layer: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = pairs.__getitem__
        groups = {layer_id: found.index(LayerGroup.of_spec(spec)) for layer_id, spec in self.specs.items()}
        self.group_of: Callable[[int], int] = groups.__getitem__

    def layer_tensors(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """All tensors of one layer: [num_pages + 1, page_size, kv_heads, dim] for each of its
        spec's cache_dims.
        """
        return self._layers[layer_id]

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies pages in all layers. `sources`, `targets`: [n, G] int64 on the pool's device, a
        page in each page group; no page is in both, but for page 0.
        """
        for tensor, group in zip(self.tensors, self.tensor_groups):
            # On a CPU index_select would copy all of a tensor that is a view of slabs.
            tensor.index_copy_(1, targets[:, group], tensor[:, sources[:, group]])


def _scales(spec: AttentionSpec, given: KVScales) -> KVScales:
    return KVScales(given.keys, given.keys) if spec.variant == "mla" else given


def _keys_and_values(spec: AttentionSpec, held: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = held[0], held[-1][..., : spec.v_head_dim]
    return (keys, values) if keys.dtype == spec.dtype else (keys.view(spec.dtype), values.view(spec.dtype))


def _zeros(device: torch.device, group: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


class LayerGroup(NamedTuple):
    """What the layers of one page group have in common.

    Attributes:
        window: in tokens; None: all.
        sizes: bytes of a token in the tensors of a layer, each size once. With one size, slabs of the
            group can be memory of other groups (slab_plan.py).
    """

    window: int | None
    sizes: tuple[int, ...]

    @classmethod
    def of_spec(cls, spec: AttentionSpec) -> "LayerGroup":
        sizes = {spec.num_kv_heads * dim * spec.dtype.itemsize for dim in spec.cache_dims}
        return cls(spec.sliding_window, tuple(sorted(sizes)))


def layer_groups(layers: Iterable[AttentionSpec]) -> tuple[LayerGroup, ...]:
    """The page groups of layers with these specs. Those without a window come first, then windows in
    order; groups of one window are in the order of their layers."""
    groups = dict.fromkeys([LayerGroup.of_spec(spec) for spec in layers])
    return tuple(sorted(groups, key=lambda group: -1 if group.window is None else group.window))


def cell_bytes(layers: KVLayers, page_size: int) -> tuple[int | None, ...]:
    """Bytes of a page in one tensor, of each page group; None if keys and values differ in size."""
    return tuple([page_size * group.sizes[0] if len(group.sizes) == 1 else None for group in layer_groups(layers)])


def page_bytes(layers: KVLayers, page_size: int) -> tuple[int, ...]:
    """Bytes of a page of each page group."""
    found = dict.fromkeys(layer_groups(layers), 0)
    for spec, layer_ids in layers.items():
        found[LayerGroup.of_spec(spec)] += page_size * len(layer_ids) * spec.token_bytes
    return tuple(found.values())
