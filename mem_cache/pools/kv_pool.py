"""Keys and values of the softmax-attention layers, in pages."""

from collections.abc import Callable, Mapping, Sequence

import torch

from hybridrt.base.config import AttentionSpec

# Layer ids by the spec that they share.
KVGroups = Mapping[AttentionSpec, Sequence[int]]


class KVPool:
    """KV cache of the attention layers. Recurrent layers need no room here.

    Layers of equal spec form a group. All groups share page numbers: a page of the allocator is a
    page in every layer. Page 0 is padding and stays zero. A token's KV is at page * page_size +
    offset.

    Args:
        groups: the model's attention layers.
        num_pages: pages that an allocator may hand out (1 to num_pages).

    Attributes:
        tensors: for each group its keys, then its values: [A, num_pages + 1, page_size, kv_heads,
            dim], A layers in the order of the group. Groups of variant "mla" have one tensor.
        layer: keys and values of one layer by its id: [num_pages + 1, page_size, kv_heads, dim]
            each. The values of a latent cache are the first numbers of its keys.
    """

    def __init__(self, groups: KVGroups, *, num_pages: int, page_size: int, device: torch.device | str) -> None:
        self.page_size, self.num_pages, self.device = page_size, num_pages, torch.device(device)
        self.specs = {layer_id: spec for spec, layer_ids in groups.items() for layer_id in layer_ids}
        self.tensors: list[torch.Tensor] = []
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        for spec, layer_ids in groups.items():
            shape = (len(layer_ids), num_pages + 1, page_size, spec.num_kv_heads)
            # Kernels of other libraries multiply masked values by zero, and 0 * NaN is NaN.
            held = [torch.zeros(*shape, dim, dtype=spec.dtype, device=device) for dim in spec.cache_dims]
            self.tensors += held
            self._layers |= {layer_id: tuple(t[i] for t in held) for i, layer_id in enumerate(layer_ids)}
        pairs = {i: (held[0], held[-1][..., : self.specs[i].v_head_dim]) for i, held in self._layers.items()}
        self.layer: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = pairs.__getitem__

    def held(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """All tensors of one layer: [num_pages + 1, page_size, kv_heads, dim] for each of its
        spec's cache_dims.
        """
        return self._layers[layer_id]

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies pages in all layers. `sources`, `targets`: [n] int64 on the pool's device; no page
        is in both.
        """
        for tensor in self.tensors:
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))

    @staticmethod
    def page_bytes(groups: KVGroups, page_size: int) -> int:
        return page_size * sum(len(layer_ids) * spec.token_bytes for spec, layer_ids in groups.items())
