"""Calls as JSON objects with a name and arguments, shared by several formats."""

import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from hybridrt.base.errors import is_text
from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import calls, one_call
from hybridrt.chat.tool_parser import CallSink, ToolParser
from hybridrt.chat.tools import Tool
from hybridrt.chat.values import read_string, read_text, read_value

_ARGUMENTS = ("arguments", "parameters")
_OPENS = re.compile(r"\{")
_CLOSES = re.compile(r"\}*")


class JsonCalls(ToolParser):
    """{"name": "f", "arguments": {...}}, or a list of these. Keys in any order.

    Attributes:
        listed: the model writes a list.
    """

    listed: ClassVar[bool] = True

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        call = one_call(tools)
        schema = {"type": "array", "items": call, "minItems": 1} if self.listed else call
        return [f"section: %json {calls(tools, schema)}"]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        yield from scanner.space()
        listed = opened == "[" or bool((yield from scanner.accept("[")))
        yield from read_list(scanner, listed, lambda: read_call(scanner, sink), _OPENS)


def read_list(scanner: Scanner, listed: bool, read: Callable[[], Step[None]], begins: re.Pattern[str]) -> Step[None]:
    """Calls with or without commas: up to the closing bracket if `listed`, else up to the last one.

    Args:
        read: reads one call.
        begins: the first character of a call.
    """
    while True:
        yield from scanner.space()
        if listed and (yield from scanner.accept("]")):
            return
        yield from read()
        yield from scanner.space()
        if (yield from scanner.accept(",")) or begins.match((yield from scanner.peek())):
            continue
        if listed:
            yield from scanner.accept("]")  # some models leave it out
        return


def read_call(scanner: Scanner, sink: CallSink) -> Step[None]:
    """One object. The call begins once its name is known and its arguments look like an object."""
    yield from scanner.expect("{")
    yield from scanner.accept("{")  # some models double it; no key begins with one
    name, early = "", ""  # `early`: arguments before the name
    while True:
        yield from scanner.space()
        key = yield from read_text(scanner)
        yield from scanner.space()
        yield from scanner.expect(":")
        yield from scanner.space()
        if key == "name":
            name = yield from read_text(scanner)
            if not name:
                raise Malformed
        elif key in _ARGUMENTS and name and not sink.inside:
            yield from _stream_arguments(scanner, sink, name)
        elif key in _ARGUMENTS:
            early = yield from _whole_arguments(scanner)
        else:
            yield from read_value(scanner, lambda text: None)
        yield from scanner.space()
        if not (yield from scanner.accept(",")):
            break
    if not sink.inside:
        yield from scanner.expect("}")
        if not name:
            raise Malformed
        sink.begin_call(name)
        sink.arguments(early or "{}")
    yield from scanner.run(_CLOSES)  # left out, or written too often
    sink.end_call()


def _stream_arguments(scanner: Scanner, sink: CallSink, name: str) -> Step[None]:
    if (yield from scanner.peek()) != "{":
        text = yield from _whole_arguments(scanner)
        sink.begin_call(name)
        sink.arguments(text)
        return
    begun = list[str]()

    def emit(text: str) -> None:
        """Holds the first piece: an object that breaks at once is no call."""
        if sink.inside:
            sink.arguments(text)
            return
        begun.append(text)
        if len("".join(begun).rstrip()) > 1:
            sink.begin_call(name)
            sink.arguments("".join(begun))

    yield from read_value(scanner, emit)


def _whole_arguments(scanner: Scanner) -> Step[str]:
    """Accepts an object, also within a string; or null, for none."""
    pieces = list[str]()
    first = yield from scanner.peek()
    if first in ('"', "'"):
        yield from read_string(scanner, pieces.append)
        text: str = json.loads(f'"{"".join(pieces)}"')
    else:
        yield from read_value(scanner, pieces.append)
        text = "".join(pieces)
    try:
        value = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        raise Malformed from None
    if value is None:
        return "{}"
    if not isinstance(value, dict) or not is_text(text):
        raise Malformed
    return text
