"""hybridrt: a runtime for language models that mix softmax attention with recurrent layers."""

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrt import errors
from hybridrt.errors import *  # noqa: F403  # every error is public
from hybridrt.version import __version__ as __version__

if TYPE_CHECKING:  # `as` tells type checkers that the names are public
    from hybridrt.chat.events import ToolCall as ToolCall
    from hybridrt.config import EngineConfig as EngineConfig
    from hybridrt.config import SpeculativeConfig as SpeculativeConfig
    from hybridrt.engine.async_llm import AsyncLLM as AsyncLLM
    from hybridrt.engine.chats import ChatDelta as ChatDelta
    from hybridrt.engine.chats import ChatOutput as ChatOutput
    from hybridrt.engine.engine import Engine as Engine
    from hybridrt.engine.llm import LLM as LLM
    from hybridrt.engine.outputs import Delta as Delta
    from hybridrt.engine.outputs import FinishReason as FinishReason
    from hybridrt.engine.outputs import RequestMetrics as RequestMetrics
    from hybridrt.engine.outputs import RequestOutput as RequestOutput
    from hybridrt.engine.prompts import Prompt as Prompt
    from hybridrt.engine.session_file import Session as Session
    from hybridrt.sampling_params import SamplingParams as SamplingParams
    from hybridrt.structured_outputs import StructuredOutputs as StructuredOutputs

_PUBLIC = {
    "hybridrt.chat.events": ("ToolCall",),
    "hybridrt.config": ("EngineConfig", "SpeculativeConfig"),
    "hybridrt.engine.async_llm": ("AsyncLLM",),
    "hybridrt.engine.chats": ("ChatDelta", "ChatOutput"),
    "hybridrt.engine.engine": ("Engine",),
    "hybridrt.engine.llm": ("LLM",),
    "hybridrt.engine.outputs": ("Delta", "FinishReason", "RequestMetrics", "RequestOutput"),
    "hybridrt.engine.prompts": ("Prompt",),
    "hybridrt.engine.session_file": ("Session",),
    "hybridrt.sampling_params": ("SamplingParams",),
    "hybridrt.structured_outputs": ("StructuredOutputs",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
if not TYPE_CHECKING:
    __all__ = [*_HOME, *errors.__all__]

# In a checkout models/ and mem_cache/ stand beside this package, and a checkout on sys.path hides an installed package.
# Those two are packages of hybridrt, and nothing else of the checkout is.
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
    return sorted(
        {"__version__", "errors", *globals()["__all__"], *(name for name in globals() if name.startswith("__"))}
    )
