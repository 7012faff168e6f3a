"""hybridrt: a runtime for language models that mix softmax attention with recurrent layers."""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrt import errors
from hybridrt.base.version import __version__ as __version__
from hybridrt.errors import *  # noqa: F403  # every error is public

if TYPE_CHECKING:  # `as` tells type checkers that the names are public
    from hybridrt.base.engine_config import EngineConfig as EngineConfig
    from hybridrt.base.engine_config import SpeculativeConfig as SpeculativeConfig
    from hybridrt.base.sampling_params import SamplingParams as SamplingParams
    from hybridrt.base.structured_outputs import StructuredOutputs as StructuredOutputs
    from hybridrt.chat.events import ToolCall as ToolCall
    from hybridrt.engine.api.async_llm import AsyncLLM as AsyncLLM
    from hybridrt.engine.api.chats import ChatDelta as ChatDelta
    from hybridrt.engine.api.chats import ChatOutput as ChatOutput
    from hybridrt.engine.api.llm import LLM as LLM
    from hybridrt.engine.cache.session_file import Session as Session
    from hybridrt.engine.core.engine import Engine as Engine
    from hybridrt.engine.request.outputs import Delta as Delta
    from hybridrt.engine.request.outputs import FinishReason as FinishReason
    from hybridrt.engine.request.outputs import RequestMetrics as RequestMetrics
    from hybridrt.engine.request.outputs import RequestOutput as RequestOutput
    from hybridrt.engine.request.prompts import Prompt as Prompt
    from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent as CacheEvent
    from hybridrt.mem_cache.prefix_tree.cache_events import CacheSubscription as CacheSubscription
    from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey as CacheKey
    from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheMiss as CacheMiss

_PUBLIC = {
    "hybridrt.chat.events": ("ToolCall",),
    "hybridrt.base.engine_config": ("EngineConfig", "SpeculativeConfig"),
    "hybridrt.engine.api.async_llm": ("AsyncLLM",),
    "hybridrt.engine.api.chats": ("ChatDelta", "ChatOutput"),
    "hybridrt.engine.core.engine": ("Engine",),
    "hybridrt.engine.api.llm": ("LLM",),
    "hybridrt.engine.request.outputs": ("Delta", "FinishReason", "RequestMetrics", "RequestOutput"),
    "hybridrt.engine.request.prompts": ("Prompt",),
    "hybridrt.engine.cache.session_file": ("Session",),
    "hybridrt.mem_cache.prefix_tree.cache_events": ("CacheEvent", "CacheSubscription"),
    "hybridrt.mem_cache.prefix_tree.cache_key": ("CacheKey",),
    "hybridrt.mem_cache.prefix_tree.prefix_cache": ("CacheMiss",),
    "hybridrt.base.sampling_params": ("SamplingParams",),
    "hybridrt.base.structured_outputs": ("StructuredOutputs",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
_ERRORS: list[str] = vars(errors)["__all__"]
if not TYPE_CHECKING:
    __all__ = [*_HOME, *_ERRORS]

# In a checkout models/ and mem_cache/ are next to this package. They are packages of hybridrt, and
# nothing else of the checkout is. On sys.path a checkout hides an installed package.
_package = Path(__file__).parent


def _adopt(name: str) -> None:
    """Makes a folder of the checkout the package hybridrt.<name>."""
    folder = _package.parent / name
    spec = spec_from_file_location(f"hybridrt.{name}", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = globals()[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


if not (_package / "models").is_dir():
    _adopt("models")
    _adopt("mem_cache")


def __getattr__(name: str) -> Any:
    """The public names are imported when first used: `hybridrt --help` should not wait for torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hybridrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet, and what every module has."""
    return sorted({"__version__", "errors", *_HOME, *_ERRORS, *(name for name in globals() if name.startswith("__"))})
