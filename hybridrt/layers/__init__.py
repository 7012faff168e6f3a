"""Layers of models, and `HybridSSMAdapter`, the history branch."""

from hybridrt.base.lazy_names import lazy_names

NAMES = {
    "HybridSSMAdapter": "hybridrt.models.hybrid_attention:HybridSSMAdapter",
}
__getattr__ = lazy_names(__name__, NAMES)
