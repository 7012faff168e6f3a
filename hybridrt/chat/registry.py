"""Registered formats of tool calls and reasoning: those of this package and of entry points."""

from collections.abc import Collection, Sequence
from typing import Any

from hybridrt.base.errors import ConfigError
from hybridrt.base.plugins import Plugins
from hybridrt.chat.reasoning import ReasoningTags
from hybridrt.chat.tool_parser import ToolParser

# Places by name. An entry point is a subclass of ToolParser, or a ReasoningTags.
_TOOLS = "hybridrt.chat.tool_parsers"
TOOL_PARSERS = Plugins(
    "hybridrt.tool_parsers",
    {
        "glm": f"{_TOOLS}.glm:Glm",
        "granite": f"{_TOOLS}.granite:Granite",
        "harmony": f"{_TOOLS}.harmony:Harmony",
        "hermes": f"{_TOOLS}.hermes:Hermes",
        "jamba": f"{_TOOLS}.jamba:Jamba",
        "kimi_k2": f"{_TOOLS}.kimi_k2:KimiK2",
        "lfm2": f"{_TOOLS}.lfm2:Lfm2",
        "minimax_m1": f"{_TOOLS}.minimax_m1:MinimaxM1",
        "minimax_text": f"{_TOOLS}.minimax_text:MinimaxText",
        "nemotron": f"{_TOOLS}.nemotron:Nemotron",
        "olmo": f"{_TOOLS}.olmo:Olmo",
        "qwen3_coder": f"{_TOOLS}.qwen3_coder:Qwen3Coder",
    },
    "tool parser",
    ToolParser,
    ConfigError,
    classes=True,
)
REASONING_PARSERS = Plugins(
    "hybridrt.reasoning_parsers",
    {
        "think": "hybridrt.chat.reasoning:THINK",
        "granite": "hybridrt.chat.reasoning:GRANITE",
        "harmony": "hybridrt.chat.reasoning:HARMONY",
    },
    "reasoning parser",
    ReasoningTags,
    ConfigError,
)


def choose(registry: Plugins, name: str, template: str, vocabulary: Collection[str] = ()) -> Any:
    """The registered object of a name. "none": None. "auto": the one with the longest markers that
    the chat template contains, else the one whose tokens are in the vocabulary, else None.

    Args:
        vocabulary: tokens that were added to the tokenizer's own.

    Raises:
        ConfigError: the name is not registered; the text lists those that are.
    """
    if name == "none":
        return None
    if name != "auto":
        return registry.load(name)
    formats = [registry.load(each) for each in registry.names()]
    fitting = {i: length for i, found in enumerate(formats) if (length := _marked(found.markers, template)) is not None}
    if fitting:
        return formats[max(fitting, key=lambda i: fitting[i])]
    tokens = (getattr(found, "tokens", ()) for found in formats)
    known = [bool(needed) and all(token in vocabulary for token in needed) for needed in tokens]
    return formats[known.index(True)] if any(known) else None


def _marked(markers: Sequence[str | tuple[str, ...]], template: str) -> int | None:
    """Counts their characters in the template; None if one is missing."""
    found = 0
    for marker in markers:
        options = (marker,) if isinstance(marker, str) else marker
        lengths = [len(option) for option in options if option in template]
        if not lengths:
            return None
        found += max(lengths)
    return found
