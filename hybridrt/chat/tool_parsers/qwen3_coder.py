"""Qwen3-Coder's XML: a section a call, a tag a parameter, values as they are.

    <tool_call>
    <function=f>
    <parameter=a>
    x
    </parameter>
    </function>
    </tool_call>

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, Qwen/Qwen3.5-4B and
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, and the tests of vLLM's qwen3coder parser for what models leave out: the outer
tag, the end of a parameter.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrt.chat.conversation import Tool
from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import (
    check_names,
    is_of,
    json_text,
    limited,
    named_arguments,
    options_of,
    resolved,
    types_of,
    with_definitions,
)
from hybridrt.chat.tool_parser import CallSink, ToolParser
from hybridrt.chat.values import MAX_NAME, escaped, read_value
from hybridrt.errors import RequestError

# Each ends a value. The line break before a tag belongs to the tag.
_ENDS = tuple(space + tag for tag in ("</parameter>", "<parameter=", "</function>") for space in ("\n", ""))
_NAME = re.compile(r"(?!\s)[^>\n]+(?<!\s)")  # of a function or a parameter
_QUOTE_OR_ESCAPED = re.compile(r'\\.|"', re.DOTALL)
# Rules of grammars: what a function without a strict schema holds, and text as a parameter.
_FREE = ('free: ("<parameter=" KEY ">\\n" value)* "</function>"', r"KEY: /[^\s<>]{1,256}/")
# Text as a parameter cannot hold what the parser takes for its end.
_TEXT = (
    "value[lazy]: VALUE",
    r"VALUE: /(?s:.*)\n<\/parameter>\n/ & ~/(?s:.*)(<parameter=|<\/function>|<\/parameter>(?s:..))(?s:.*)/",
)


class Qwen3Coder(ToolParser):
    """Also of Qwen 3.5 and Nemotron 3."""

    opens = ("<tool_call>", "<function=")
    closes = ("</tool_call>",)
    markers = ("<function=", "<parameter=")

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        """Parameters come in the schema's order. Enumerations of text are enforced, its length and patterns are not."""
        check_names(tools, _NAME)
        calls = limited(_call_rule(tool, f"call{i}") for i, tool in enumerate(tools))
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        return [f"section: {names}", *calls, *_FREE, *_TEXT]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        if opened != "<function=":
            yield from scanner.space()
            yield from scanner.expect("<function=")
        name = yield from scanner.name(">", MAX_NAME)
        schema = self.tools.get(name, {})
        properties = _properties(resolved(schema, schema))
        yield from scanner.space()
        found = yield from scanner.expect("<parameter=", "</function>")
        sink.begin(name)
        before = "{"
        while found == "<parameter=":
            key = yield from scanner.name(">", MAX_NAME)
            sink.arguments(f'{before}"{escaped(key)}": ')
            found = yield from _parameter(scanner, sink, types_of(properties.get(key), schema))
            before = ", "
            if found == "</parameter>":
                yield from scanner.space()
                found = yield from scanner.accept("<parameter=", "</function>")
                if not found and scanner.cut_off:
                    raise Malformed  # further parameters may be missing
        sink.arguments("{}" if before == "{" else "}")
        sink.end()


def _parameter(scanner: Scanner, sink: CallSink, types: set[str]) -> Step[str]:
    """Reads a value and what ends it. Text streams; other values are converted when they are whole."""
    yield from scanner.accept("\n")
    if types <= {"string"}:
        sink.arguments('"')
        end = yield from scanner.until(_ENDS, lambda text: sink.arguments(escaped(text)))
        value = '"'
    else:
        pieces = list[str]()
        end = yield from _until_end(scanner, pieces)
        value = _converted("".join(pieces), types)
    if not end:
        raise Malformed  # cut off: the arguments must not look whole
    sink.arguments(value)
    return end.removeprefix("\n")


def _until_end(scanner: Scanner, pieces: list[str]) -> Step[str]:
    """Reads a value that is no text, and what ends it. A tag within a string of a list or an object belongs to the
    string, unless a line break precedes it: there are none within the strings of JSON."""
    end = yield from scanner.until(_ENDS, pieces.append)
    text, inside = "".join(pieces), False
    nested = text.lstrip()[:1] in ("{", "[")
    while nested and end and end[0] != "\n":
        inside ^= _QUOTE_OR_ESCAPED.findall(text).count('"') % 2 == 1
        if not inside:
            break
        pieces.append(end)
        start = len(pieces)
        end = yield from scanner.until(_ENDS, pieces.append)
        text = "".join(pieces[start:])
    return end


def _converted(text: str, types: set[str]) -> str:
    """JSON text of a value: of one of the types if it can be read as one, else of a string."""
    found = _python_as_json(text.strip())
    if found is not None:
        value = json.loads(found)
        if any(is_of(value, name) for name in types - {"string"}):
            return found
        if "integer" in types and isinstance(value, float) and value.is_integer():
            return str(int(value))
    return f'"{escaped(text)}"'


def _python_as_json(text: str) -> str | None:
    """A value in JSON or Python's syntax as JSON text; None if it is neither."""
    if text.lower() in ("true", "false", "null"):
        return text.lower()
    scanner, pieces = Scanner(), list[str]()
    scanner.add(text)
    scanner.closed = True
    try:
        for _ in read_value(scanner, pieces.append):
            pass
    except Malformed:
        return None
    return None if scanner.num_ready else "".join(pieces)


def _call_rule(tool: Tool, rule: str) -> str:
    if not tool.strict:
        return f"{rule}: {json_text(f'<function={tool.name}>' + chr(10))} free"
    parts = limited(
        _parameter_rule(key, schema, tool) + ("" if needed else "?")
        for key, (schema, needed) in named_arguments(tool, _NAME).items()
    )
    return " ".join([f"{rule}:", json_text(f"<function={tool.name}>\n"), *parts, '"</function>"'])


def _parameter_rule(key: str, schema: Any, tool: Tool) -> str:
    root = tool.parameters
    schema = resolved(schema, root)
    options, types = options_of(schema), types_of(schema, root)
    end = json_text("\n</parameter>\n")
    if options is not None and (not types or "string" in types):
        texts = [text for text in map(_as_text, options) if not any(tag in text for tag in _ENDS)]
        texts = [text for text in texts if types == {"string"} or json.loads(_converted(text, types)) in options]
        if not texts:
            raise RequestError(f"no value of {key} of {tool.name} can be written: leave strict out", "tools")
        value = f"({' | '.join(map(json_text, texts))}) {end}"
    elif not types or "string" in types:
        value = "value"
    else:
        value = f"%json {json_text(with_definitions(schema, root))} {end}"
    return f"({json_text(f'<parameter={key}>' + chr(10))} {value})"


def _as_text(option: Any) -> str:
    """A value as a parameter holds it."""
    return option if isinstance(option, str) else json_text(option)


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}
