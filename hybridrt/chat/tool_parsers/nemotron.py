"""Nemotron: `<TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>`, all calls in one section.

Source: the chat template of nvidia/NVIDIA-Nemotron-Nano-9B-v2. Nemotron 3 writes the XML of Qwen3-Coder.
"""

from hybridrt.chat.tool_parsers.json_calls import JsonCalls


class Nemotron(JsonCalls):
    """The format of Nemotron Nano v2."""

    opens = ("<TOOLCALL>",)
    closes = ("</TOOLCALL>",)
    markers = ("<TOOLCALL>",)
