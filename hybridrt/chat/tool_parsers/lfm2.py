"""LFM2: `<|tool_call_start|>[f(a="x", b=1), g()]<|tool_call_end|>`, calls as in Python with arguments by name.

Source: the chat template and the model card of LiquidAI/LFM2-1.2B.
"""

import re
from collections.abc import Mapping, Sequence

from hybridrt.chat.conversation import Tool
from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import json_text, resolved, with_definitions
from hybridrt.chat.tool_parser import CallSink
from hybridrt.chat.tool_parsers.json_calls import JsonCalls
from hybridrt.chat.values import MAX_NAME, escaped, read_value

_NAME = re.compile(r"[\w.:/-]*")
_KEYWORD = re.compile(r"\w*")


class Lfm2(JsonCalls):
    """Of LFM2 and LFM2.5. They write JSON between the tags if the system prompt asks for it."""

    opens = ("<|tool_call_start|>",)
    closes = ("<|tool_call_end|>",)
    markers = ("<|tool_call_start|>",)

    def section_rules(self, tools: Sequence[Tool]) -> Sequence[str] | None:
        """Values are JSON, and required arguments come first."""
        calls = [f"{json_text(f'{tool.name}(')} {_arguments_rule(tool)} {json_text(')')}" for tool in tools]
        return ['section: "[" call (", " call)* "]"', f"call: {' | '.join(calls)}", r"KEYWORD: /\w{1,256}/"]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        yield from scanner.space()
        if (yield from scanner.peek(2)) == "[{" or (yield from scanner.peek()) == "{":
            yield from super().read_calls(scanner, sink, opened)
            return
        listed = yield from scanner.accept("[")
        while True:
            yield from scanner.space()
            if listed and (yield from scanner.accept("]")):
                return
            yield from _call(scanner, sink)
            yield from scanner.space()
            if not (yield from scanner.accept(",")) and not listed:
                return


def _arguments_rule(tool: Tool) -> str:
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    if not tool.strict:
        return '(KEYWORD "=" %json {} (", " KEYWORD "=" %json {})*)?'
    if not isinstance(properties, Mapping):
        return ""
    names = sorted(properties, key=lambda name: name not in required) if isinstance(required, list) else [*properties]
    rules = {}
    for name in names:
        schema = with_definitions(resolved(properties[name], tool.parameters), tool.parameters)
        rules[name] = f"{json_text(f'{name}=')} %json {json_text(schema)}"
    must = [name for name in names if isinstance(required, list) and name in required]
    may = [f'(", " {rules[name]})?' for name in names if name not in must]
    if must:
        return " ".join([' ", " '.join(rules[name] for name in must), *may])
    starts = [" ".join([rules[name], *may[i + 1 :]]) for i, name in enumerate(names)]
    return f"({' | '.join(starts)})?" if starts else ""


def _call(scanner: Scanner, sink: CallSink) -> Step[None]:
    name = yield from scanner.run(_NAME, MAX_NAME)
    yield from scanner.expect("(")
    if not name:
        raise Malformed
    yield from scanner.space()
    keyword, before = "", "{"
    while not (yield from scanner.accept(")")):
        keyword = yield from scanner.run(_KEYWORD, MAX_NAME)
        yield from scanner.space()
        yield from scanner.expect("=")
        yield from scanner.space()
        if not keyword:
            raise Malformed
        if not sink.inside:
            sink.begin(name)
        sink.arguments(f'{before}"{escaped(keyword)}": ')
        yield from read_value(scanner, sink.arguments)
        yield from scanner.space()
        before = ", "
        if not (yield from scanner.accept(",")) and (yield from scanner.peek()) != ")":
            raise Malformed
        yield from scanner.space()
    if not sink.inside:
        sink.begin(name)
    sink.arguments("}" if keyword else "{}")
    sink.end()
