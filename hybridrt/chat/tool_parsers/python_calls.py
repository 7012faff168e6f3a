"""Calls as in Python with arguments by name, `f(a="x", b=1)`, shared by several formats."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from hybridrt.chat.python_values import read_literal
from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import check_names, json_text, limited, named_arguments, resolved, with_definitions
from hybridrt.chat.tool_parser import CallSink
from hybridrt.chat.tool_parsers.json_calls import JsonCalls, read_list
from hybridrt.chat.tools import Tool
from hybridrt.chat.values import MAX_NAME, escaped

_NAME = re.compile(r"[\w.:/-]*")
_KEYWORD = re.compile(r"\w*")
_OPENS = re.compile(r"\w")


class PythonCalls(JsonCalls):
    """Calls in Python's syntax, or in JSON's, which system prompts may ask for.

    Attributes:
        listed: the calls are a list. Else each has a line.
    """

    listed: ClassVar[bool] = True

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        """Values are JSON, and required arguments come first."""
        check_names(tools, _NAME)
        calls = limited(_call_rules(tool, f"call{i}") for i, tool in enumerate(tools))
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        section = '"[" call (", " call)* "]"' if self.listed else r'call ("\n" call)*'
        return [f"section: {section}", f"call: {names}", *calls, r"KEYWORD: /\w{1,256}/"]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        yield from scanner.space()
        if (yield from scanner.peek(2)) == "[{" or (yield from scanner.peek()) == "{":
            yield from super().read_calls(scanner, sink, opened)
            return
        listed = bool((yield from scanner.accept("[")))
        yield from read_list(scanner, listed, lambda: _call(scanner, sink), _OPENS)


def _call_rules(tool: Tool, rule: str) -> str:
    opened, must, may = json_text(f"{tool.name}("), list[str](), list[str]()
    if not tool.strict:
        return f'{rule}: {opened} (KEYWORD "=" %json {{}} (", " KEYWORD "=" %json {{}})*)? ")"'
    arguments = named_arguments(tool, _KEYWORD)
    rules = limited(f"{rule}_{i}: {text}" for i, text in enumerate(_argument_rules(tool, arguments)))
    for i, (_, needed) in enumerate(arguments.values()):
        (must if needed else may).append(f"{rule}_{i}")
    # A rule for the optional arguments from each on avoids quadratic length.
    ends = [f"{rule}_from{i}" for i in range(len(may))] + ['""']
    rules += [f'{ends[i]}: (", " {name})? {ends[i + 1]}' for i, name in enumerate(may)]
    if must:
        inner = ' ", " '.join(must) + f" {ends[0]}"
    else:
        inner = " | ".join([*(f"{name} {ends[i + 1]}" for i, name in enumerate(may)), '""'])
    return "\n".join([f"{rule}: {opened} ({inner}) {json_text(')')}", *rules])


def _argument_rules(tool: Tool, arguments: Mapping[str, tuple[Any, bool]]) -> Iterator[str]:
    for name, (schema, _) in arguments.items():
        schema = with_definitions(resolved(schema, tool.parameters), tool.parameters)
        yield f"{json_text(f'{name}=')} %json {json_text(schema)}"


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
            sink.begin_call(name)
        sink.arguments(f'{before}"{escaped(keyword)}": ')
        yield from read_literal(scanner, sink.arguments)
        yield from scanner.space()
        before = ", "
        if not (yield from scanner.accept(",")) and (yield from scanner.peek()) != ")":
            raise Malformed
        yield from scanner.space()
    if not sink.inside:
        sink.begin_call(name)
    sink.arguments("}" if keyword else "{}")
    sink.end_call()
