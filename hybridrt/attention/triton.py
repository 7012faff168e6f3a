"""Softmax attention by our own Triton kernels."""

from hybridrt.attention.paged import PagedAttnBackend


class TritonAttnBackend(PagedAttnBackend):
    """Decode is split over the KV length, on the device. Prefill is a flash kernel over pages."""

    provider = "triton"
    serves_latent = serves_sinks = serves_codes = True
    auto_decode = auto_prefill = ("cuda",)
