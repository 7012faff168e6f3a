"""MiniMax-M1: `<tool_calls>`, an object `{"name": "f", "arguments": {...}}` a line, `</tool_calls>`.

Source: the chat template and the guide to function calls of MiniMaxAI/MiniMax-M1-80k.
"""

from collections.abc import Callable, Sequence

from hybridrt.chat.schemas import calls, one_call
from hybridrt.chat.tool_parsers.json_calls import JsonCalls
from hybridrt.chat.tools import Tool


class MinimaxM1(JsonCalls):
    """The format of MiniMax-M1."""

    opens = ("<tool_calls>", "<tool_call>")
    closes = ("</tool_calls>", "</tool_call>")
    markers = ("<tool_calls>", "tool_setting=tools")
    listed = False

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        return [r'section: call ("\n" call)*', f"call: %json {calls(tools, one_call(tools))}"]
