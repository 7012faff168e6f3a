"""Custom tools of OpenAI, which take one text: the model calls them as functions with {"input": text}."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from hybridrt.chat.tools import read_tools

WARNING = "the grammar of a custom tool holds if tool_choice names the tool; else the model only reads it"


def input_of(arguments: str) -> str:
    """The text of a call's arguments, whole or cut off; they themselves if they hold none."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def custom_tools(tools: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Those of checked tools, in the form of chats, that are custom."""
    return [tool for tool in tools if isinstance(tool, Mapping) and tool.get("type") == "custom"]


def grammar_warnings(tools: Iterable[Any]) -> list[str]:
    """What a header says of checked tools, in the form of chats, if no schema can say the grammar of one."""
    return [WARNING] if any(tool.grammar is not None for tool in read_tools(custom_tools(tools))) else []


def custom_call(name: str, tool: str, text: str) -> dict[str, Any]:
    """A call of a message, in OpenAI's form."""
    return {"id": name, "type": "custom", "custom": {"name": tool, "input": text}}
