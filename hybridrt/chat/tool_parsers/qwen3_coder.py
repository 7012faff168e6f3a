"""Qwen3-Coder's XML: a section a call, a tag a parameter, values as they are.

    <tool_call>
    <function=f>
    <parameter=a>
    x
    </parameter>
    </function>
    </tool_call>

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, Qwen/Qwen3.5-4B and
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, the response template of LiquidAI/LFM3-VL-2B, and the tests of vLLM's qwen3coder
parser for what models leave out: the outer tag, the end of a parameter. Qwen 3.5 sometimes writes
Hermes JSON in the outer tag, which is read, too.
"""

import re
from collections.abc import Callable, Sequence

from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import check_names, json_text, limited, properties_of, types_of
from hybridrt.chat.tool_parser import CallSink, ToolParser
from hybridrt.chat.tool_parsers.json_calls import read_call
from hybridrt.chat.tool_parsers.tagged_rules import CallLayout
from hybridrt.chat.tool_parsers.tagged_values import Tags, read_name, read_text, read_typed
from hybridrt.chat.tools import Tool
from hybridrt.chat.values import MAX_NAME, escaped

_TAGS = Tags(
    close="</parameter>",
    opens=("<parameter=", "<parameter>"),
    name_close=">",
    ends=("</function>", "</tool_call>"),
    outer=("<tool_call>", "<function="),
    quoted="<function=",
    lines=True,
)
_LAYOUT = CallLayout(
    _TAGS,
    name=lambda name: json_text(f"<function={name}>\n"),
    open=lambda key: json_text(f"<parameter={key}>\n"),
    close=json_text("\n</parameter>\n"),
    end='"</function>"',
)
_NAME = re.compile(r"(?!\s)[^>\n]+(?<!\s)")  # a name of a function or a parameter that a schema may have
_CALLED = re.compile(r"[^\s<>=]+")
# Rules for functions without a strict schema.
_FREE = ('free: ("<parameter=" KEY ">\\n" value)* "</function>"', r"KEY: /[^\s<>=]{1,256}/")
# Text cannot hold what the parser takes for its end.
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
        """Parameters in the schema's order. Enumerations of text are enforced, its length and
        patterns are not."""
        check_names(tools, _NAME)
        calls = limited(_LAYOUT.call(tool, f"call{i}", _NAME) for i, tool in enumerate(tools))
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        return [f"section: {names}", *calls, *_FREE, *_TEXT]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        if opened != "<function=":
            yield from scanner.space()
            if (yield from scanner.peek()) == "{":
                yield from read_call(scanner, sink)
                return
            yield from scanner.expect("<function=")
        name = yield from scanner.name(">", MAX_NAME)
        if name not in self.tools and not _CALLED.fullmatch(name):
            raise Malformed
        yield from scanner.space()
        found = yield from scanner.expect(*_TAGS.opens, "</function>")
        sink.begin_call(name)
        yield from self._parameters(scanner, sink, name, found)
        sink.end_call()

    def _parameters(self, scanner: Scanner, sink: CallSink, name: str, found: str) -> Step[None]:
        schema = self.tools.get(name, {})
        properties = properties_of(schema)
        before, left = "{", set(properties)
        while found in _TAGS.opens:
            key = (yield from read_name(scanner, _TAGS, properties)) if found == _TAGS.opens[0] else ""
            block = bool((yield from scanner.accept("\n")))
            left.discard(key)
            names = left if properties else None
            if key:
                sink.arguments(f'{before}"{escaped(key)}": ')
                types = types_of(properties.get(key), schema)
                found = yield from read_typed(scanner, _TAGS, sink.arguments, types, names, block)
                before = ", "
            else:  # a broken tag: its value is dropped
                found = yield from read_text(scanner, _TAGS, lambda text: None, names, block)
            if found == _TAGS.close:
                yield from scanner.space()
                found = yield from scanner.accept(*_TAGS.opens, "</function>")
                if not found and scanner.cut_off:
                    raise Malformed  # further parameters may be missing
        sink.arguments("{}" if before == "{" else "}")
