"""Attention backends, and the public names of hybrid serving in one place."""

from hybridrt.base.lazy_names import lazy_names

NAMES = {
    "AttentionBackend": "hybridrt.attention.base:AttentionBackend",
    "AttentionInputs": "hybridrt.attention.base:AttentionInputs",
    "HybridAttnBackend": "hybridrt.attention.prefill_decode:HybridAttnBackend",
    "HybridLinearAttnBackend": "hybridrt.recurrent.backend:HybridLinearAttnBackend",
    "MambaAttnBackendBase": "hybridrt.recurrent.backend:MambaAttnBackendBase",
    "Mamba2AttnBackend": "hybridrt.recurrent.mamba2:Mamba2AttnBackend",
    "PrefillDecodeAttnBackend": "hybridrt.attention.prefill_decode:PrefillDecodeAttnBackend",
}
__getattr__ = lazy_names(__name__, NAMES)
