"""Layers; the adapter of a history branch, which is part of a model, is found here, too."""

from hybridrt.base.lazy_names import lazy_names

NAMES = {
    "HybridSSMAdapter": "hybridrt.models.hybrid_attention:HybridSSMAdapter",
}
__getattr__ = lazy_names(__name__, NAMES)
