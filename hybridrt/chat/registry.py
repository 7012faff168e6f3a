"""Names to formats of tool calls and of reasoning: those of this package, and those that other packages name in entry
points."""

from typing import Any

from hybridrt.chat.reasoning import ReasoningTags
from hybridrt.chat.tool_parser import ToolParser
from hybridrt.errors import ConfigError
from hybridrt.plugins import Plugins

# "module:object" by name. Packages add theirs with entry points, "name = module:object": of the first group a class
# below ToolParser, of the second a ReasoningTags.
_TOOLS = "hybridrt.chat.tool_parsers"
TOOL_PARSERS = Plugins(
    "hybridrt.tool_parsers",
    {
        "granite": f"{_TOOLS}.granite:Granite",
        "hermes": f"{_TOOLS}.hermes:Hermes",
        "jamba": f"{_TOOLS}.jamba:Jamba",
        "kimi_k2": f"{_TOOLS}.kimi_k2:KimiK2",
        "lfm2": f"{_TOOLS}.lfm2:Lfm2",
        "nemotron": f"{_TOOLS}.nemotron:Nemotron",
        "qwen3_coder": f"{_TOOLS}.qwen3_coder:Qwen3Coder",
    },
    "tool parser",
    ToolParser,
    ConfigError,
    classes=True,
)
REASONING_PARSERS = Plugins(
    "hybridrt.reasoning_parsers",
    {"think": "hybridrt.chat.reasoning:THINK", "granite": "hybridrt.chat.reasoning:GRANITE"},
    "reasoning parser",
    ReasoningTags,
    ConfigError,
)


def choose(registry: Plugins, name: str, template: str) -> Any:
    """The registered object of a name. "auto": the one whose markers the chat template contains; of several, the one
    with the longest markers; None if no markers match. "none": None.

    Raises:
        ConfigError: the name is not registered; the text lists those that are.
    """
    if name == "none":
        return None
    if name != "auto":
        return registry.load(name)
    fitting = [f for f in map(registry.load, registry.names()) if all(marker in template for marker in f.markers)]
    return max(fitting, key=lambda found: sum(map(len, found.markers)), default=None)
