"""hybridrt: a runtime for language models that mix softmax attention with recurrent layers."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrt.config import EngineConfig, SpeculativeConfig
    from hybridrt.engine.engine import Engine
    from hybridrt.engine.llm import LLM
    from hybridrt.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams", "SpeculativeConfig"]

_HOME = {
    "LLM": "hybridrt.engine.llm",
    "Engine": "hybridrt.engine.engine",
    "EngineConfig": "hybridrt.config",
    "SamplingParams": "hybridrt.sampling_params",
    "SpeculativeConfig": "hybridrt.config",
}

# In a checkout models/ and mem_cache/ stand beside this package, and a checkout on sys.path hides an installed package.
_package = Path(__file__).parent
if not (_package / "models").is_dir():
    __path__.append(str(_package.parent))


def __getattr__(name: str) -> Any:
    """The public names are imported when first used: `hybridrt --help` should not wait for torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hybridrt' has no attribute {name!r}")
