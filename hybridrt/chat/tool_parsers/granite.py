"""Granite: `<|tool_call|>[{"name": "f", "arguments": {...}}]`, without a closing tag.

Source: the chat templates of ibm-granite/granite-3.3-8b-instruct and granite-3.0-8b-instruct, which writes
`<tool_call>`. Granite 4 writes Hermes JSON.
"""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class Granite(JsonCalls):
    """Of Granite 3."""

    opens = ("<|tool_call|>", "<tool_call>")
    markers = ("<|tool_call|>",)
