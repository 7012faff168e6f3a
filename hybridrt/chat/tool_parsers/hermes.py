"""Hermes JSON: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one section a call.

Source: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B, Qwen/Qwen2.5-7B-Instruct and
ibm-granite/granite-4.0-h-tiny.
"""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class Hermes(JsonCalls):
    """The format of Hermes, and of Qwen 2.5, Qwen 3, Falcon-H1 and Granite 4."""

    opens = ("<tool_call>", "<tool_calls>")
    closes = ("</tool_call>", "</tool_calls>")
    markers = ("<tool_call>",)
    listed = False
