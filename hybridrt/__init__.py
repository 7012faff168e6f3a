"""hybridrt: a runtime for language models that mix softmax attention with recurrent layers."""

from typing import TYPE_CHECKING, Any

from hybridrt.config import EngineConfig, SpeculativeConfig
from hybridrt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hybridrt.engine.engine import Engine
    from hybridrt.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "SpeculativeConfig"]

_LAZY = {"LLM": "hybridrt.engine.llm", "Engine": "hybridrt.engine.engine"}


def __getattr__(name: str) -> Any:
    """LLM and Engine are imported when first used: `import hybridrt.kernels` should not pull the whole runtime in."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hybridrt' has no attribute {name!r}")
