"""Softmax attention by FlashAttention 3 (Shah et al. 2024), as sglang-kernel brings it."""

from hybridrt.attention.paged import PagedAttnBackend


class Fa3AttnBackend(PagedAttnBackend):
    """Hopper's own matrix instructions over pages; nothing is planned on the host. 16-bit KV, chains alone."""

    provider = "sgl_kernel"
