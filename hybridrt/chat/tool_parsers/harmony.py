"""Harmony: a call is a message to a function, `<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>`.

Source: the chat template of openai/gpt-oss-20b, which names the function before the channel, as
models also do.
"""

import re

from hybridrt.chat.reasoning import MESSAGE
from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.tool_parser import CallSink, ToolParser
from hybridrt.chat.values import MAX_NAME, read_value

_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


class Harmony(ToolParser):
    """Of gpt-oss. `hybridrt.chat.harmony` reads whole answers, and passes whole headers on."""

    opens = ("<|channel|>commentary to=functions.", "<|start|>assistant to=functions.")
    closes = ("<|call|>", "<|end|>", "<|return|>")
    markers = ("<|channel|>commentary", "<|call|>", "functions.")
    tokens = ("<|channel|>", "<|message|>", "<|call|>")

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        header = opened
        if not header.endswith(MESSAGE):
            header += yield from scanner.name(MESSAGE, MAX_NAME)
        function = _FUNCTION.search(header)
        yield from scanner.space()
        if function is None or (yield from scanner.peek()) != "{":
            raise Malformed
        sink.begin_call(function[1])
        yield from read_value(scanner, sink.arguments)
        sink.end_call()
