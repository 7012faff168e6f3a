"""Jamba: `<tool_calls>[{"name": "f", "arguments": {...}}, ...]</tool_calls>`, all calls in one section.

Source: the chat template of ai21labs/AI21-Jamba-1.5-Mini.
"""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class Jamba(JsonCalls):
    """The format of Jamba 1.5 to 1.7."""

    opens = ("<tool_calls>", "<tool_call>")
    closes = ("</tool_calls>", "</tool_call>")
    markers = ("<tool_calls>",)
