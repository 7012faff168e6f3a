"""MiniMax-Text-01: `<function_call>` and a block of code with a call a line, `functions.f({...})`.

Source: the chat template and the guide to function calls of MiniMaxAI/MiniMax-Text-01.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import calls, check_names, json_text, limited
from hybridrt.chat.tool_parser import CallSink, ToolParser
from hybridrt.chat.tools import Tool
from hybridrt.chat.values import MAX_NAME, read_value

_FENCE = "```typescript\n"
_NAME = re.compile(r"[\w.:/-]*")


class MinimaxText(ToolParser):
    """The format of MiniMax-Text-01."""

    opens = ("<function_call>",)
    closes = ("```",)
    markers = ("function_setting=functions",)

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        check_names(tools, _NAME)
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        return [rf'section: {json_text(_FENCE)} (call "\n")+', f"call: {names}", *limited(_call_rules(tools))]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        yield from scanner.space()
        if (yield from scanner.accept("```")):
            yield from scanner.run(_NAME, MAX_NAME)
            yield from scanner.space()
        found = yield from scanner.expect("functions.")
        while found:
            name = yield from scanner.run(_NAME, MAX_NAME)
            yield from scanner.expect("(")
            yield from scanner.space()
            if not name or (yield from scanner.peek()) not in ("{", ")"):
                raise Malformed
            sink.begin_call(name)
            if (yield from scanner.peek()) == "{":
                yield from read_value(scanner, sink.arguments)
            else:
                sink.arguments("{}")
            yield from scanner.space()
            yield from scanner.expect(")")
            yield from scanner.accept(";")
            sink.end_call()
            yield from scanner.space()
            found = yield from scanner.accept("functions.")


def _call_rules(tools: Sequence[Tool]) -> Iterator[str]:
    for i, tool in enumerate(tools):
        schema = calls([tool], {"$ref": "#/$defs/0"}) if tool.strict else '{"type": "object"}'
        yield f'call{i}: {json_text(f"functions.{tool.name}(")} %json {schema} ")"'
