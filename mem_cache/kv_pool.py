"""Keys and values of the softmax-attention layers, in pages."""

from collections.abc import Sequence

import torch


class KVPool:
    """KV cache of the attention layers alone: recurrent layers take no room here.

    `k` and `v` are [A, num_pages + 1, page_size, kv_heads, head_dim]; page 0 stands for padding and stays
    zero. A token's slot is page * page_size + offset.

    Args:
        layer_ids: the model's attention layers, in order.
        num_pages: pages that an allocator may hand out (1 to num_pages).
        num_kv_heads: of this tensor-parallel rank.
    """

    def __init__(
        self,
        *,
        layer_ids: Sequence[int],
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (len(layer_ids), num_pages + 1, page_size, num_kv_heads, head_dim)
        # Zeroed once: kernels of other libraries multiply what a mask hides by zero, and 0 * NaN is NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = {layer_id: (self.k[i], self.v[i]) for i, layer_id in enumerate(layer_ids)}

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: [num_pages + 1, page_size, kv_heads, head_dim] each."""
        return self._layers[layer_id]

    @staticmethod
    def page_bytes(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes over all attention layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
