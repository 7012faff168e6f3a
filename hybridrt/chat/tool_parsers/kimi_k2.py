"""Kimi: calls between tokens of their own, each with an id that names the function, `functions.f:0`, and an object.

Source: the chat template of moonshotai/Kimi-K2-Instruct, which Kimi-Linear shares. It writes the
ids again. Models also write section tags in the singular, or leave them out.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import calls, json_text, limited
from hybridrt.chat.tool_parser import CallSink, ToolParser
from hybridrt.chat.tools import Tool
from hybridrt.chat.values import MAX_NAME, read_value

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NUMBER = re.compile(r":\d*$")  # the name may contain a colon


class KimiK2(ToolParser):
    """The format of Kimi K2 and Kimi-Linear."""

    opens = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", _BEGIN)
    closes = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    markers = (_BEGIN, _ARGUMENTS)
    tokens = (_BEGIN, _ARGUMENTS)

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        section = f"section: ({literal(_BEGIN)} ({names}) {literal(_END)})+"
        return [section, *limited(_call_rules(tools, literal(_ARGUMENTS)))]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        if opened != _BEGIN:
            yield from scanner.space()
            yield from scanner.expect(_BEGIN)
        found = _BEGIN
        while found == _BEGIN:
            called = yield from scanner.name(_ARGUMENTS, MAX_NAME)
            name = _NUMBER.sub("", called.removeprefix("functions."))
            yield from scanner.space()
            if not name or (yield from scanner.peek()) != "{":
                raise Malformed
            sink.begin_call(name, called)
            yield from read_value(scanner, sink.arguments)
            yield from scanner.space()
            found = yield from scanner.expect(_END, _BEGIN, *self.closes)  # some models leave it out
            sink.end_call()
            if found == _END:
                yield from scanner.space()
                found = yield from scanner.accept(_BEGIN)


def _call_rules(tools: Sequence[Tool], arguments: str) -> Iterator[str]:
    for i, tool in enumerate(tools):
        schema = calls([tool], {"$ref": "#/$defs/0"}) if tool.strict else '{"type": "object"}'
        yield f"call{i}: {json_text(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {arguments} %json {schema}"
