"""Granite: `<|tool_call|>[{"name": "f", "arguments": {...}}]`. Models write a closing tag now and then.

Source: the chat templates of ibm-granite/granite-3.3-8b-instruct and granite-3.0-8b-instruct, which
writes `<tool_call>`. Granite 4 writes Hermes JSON.
"""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class Granite(JsonCalls):
    """The format of Granite 3."""

    opens = ("<|tool_call|>", "<tool_call>")
    closes = ("</tool_call>", "<|/tool_call|>", "</|tool_call|>")
    writes_close = False
    markers = ("<|tool_call|>",)
