"""Softmax attention in plain torch: the CPU path, and the oracle of the other backends."""

from hybridrt.attention.paged import PagedAttnBackend


class TorchNativeAttnBackend(PagedAttnBackend):
    """Gathers a request's pages and calls scaled_dot_product_attention."""

    provider = "torch"
    latent_operations = ("latent_extend", "attention_decode")
    auto_decode = auto_prefill = ("cpu",)
