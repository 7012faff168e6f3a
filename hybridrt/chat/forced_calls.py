"""Tool choices that leave the model no choice: a JSON schema for the whole answer."""

from typing import Any

from hybridrt.chat.conversation import Conversation, NamedTool
from hybridrt.errors import RequestError
from hybridrt.sampling_params import SamplingParams


def forces_calls(conversation: Conversation) -> bool:
    """Whether the answer must be calls."""
    return conversation.tool_choice not in ("auto", "none")


def calls_schema(conversation: Conversation) -> dict[str, Any]:
    """JSON schema of a list of calls: of the named tool one, else of any tools at least one."""
    choice = conversation.tool_choice
    named = isinstance(choice, NamedTool)
    tools = [tool for tool in conversation.tools if not named or tool.name == choice.name]  # type: ignore[union-attr]
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": dict(tool.parameters)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = {"type": "array", "items": {"anyOf": options}, "minItems": 1}
    return schema | ({"maxItems": 1} if named or not conversation.parallel_tool_calls else {})


def constrained(params: SamplingParams, conversation: Conversation) -> SamplingParams:
    """The parameters with what the tool choice asks for.

    Raises:
        RequestError: the answer cannot be forced.
    """
    if not forces_calls(conversation):
        return params
    raise RequestError("tool_choice can only be 'auto' or 'none' until outputs can follow a schema", "tool_choice")
