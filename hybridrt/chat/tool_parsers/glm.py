"""GLM's tags: a section a call, a name, then pairs of tags for a key and its value as it is.

    <tool_call>f<arg_key>a</arg_key>
    <arg_value>x</arg_value>
    </tool_call>

Source: the chat templates of inclusionAI/Ling-3.0-flash and inclusionAI/Ring-2.6-1T, which took the format from
zai-org/GLM-4.5, and the tests of vLLM's glm47 parser for what models leave out or write twice.
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

_KEY, _KEY_END, _VALUE, _END = "<arg_key>", "</arg_key>", "<arg_value>", "</tool_call>"
_TAGS = Tags(
    close="</arg_value>",
    opens=(_KEY,),
    name_close=_KEY_END,
    value_open=_VALUE,
    ends=(_END,),
    outer=("<tool_call>",),
)
_NAME = re.compile(r"[\w.:/-]*")
_ARGUMENT = re.compile(r"(?!\s)[^<>\n]+(?<!\s)")
# Text as a value cannot hold what the parser may take for its end.
_TEXT = r"TEXT_VALUE: /(?s:.*)/ & ~/(?s:.*)(<arg_key>|<\/arg_value>|<\/tool_call>)(?s:.*)/"
_CLOSED = r"CLOSED: /(?s:.*)<\/arg_value>/ & ~/(?s:.*)(<arg_key>|<\/tool_call>|<\/arg_value>(?s:.))(?s:.*)/"


class Glm(ToolParser):
    """The format of Ling 2.6 and 3, and Ring 2.6."""

    opens = ("<tool_call>",)
    closes = (_END,)
    markers = ("<tool_call>", _KEY)
    tokens = (_KEY, _VALUE)

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        """Parameters in the schema's order. Enumerations of text are enforced, its length and
        patterns are not."""
        check_names(tools, _NAME)
        before, between, close = literal(_KEY), f'{literal(_KEY_END)} "\\n" {literal(_VALUE)}', literal(_TAGS.close)
        layout = CallLayout(
            _TAGS, json_text, open=lambda key: f"{before} {json_text(key)} {between}", close=f'{close} "\\n"', end=""
        )
        # A tag that is no token belongs to the text's own rule.
        value = [f"value: TEXT_VALUE? {layout.close}", _TEXT]
        if not close.startswith("<["):
            value = ['value: closed "\\n"', "closed[lazy]: CLOSED", _CLOSED]
        calls = limited(layout.call(tool, f"call{i}", _ARGUMENT) for i, tool in enumerate(tools))
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        free = [f"free: ({before} KEY {between} value)*", r"KEY: /[^\s<>=]{1,256}/"]
        return [f"section: {names}", *calls, *free, *value]

    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        yield from scanner.space()
        if (yield from scanner.peek()) == "{":
            yield from read_call(scanner, sink)
            return
        name = yield from scanner.run(_NAME, MAX_NAME)
        yield from scanner.space()
        found = yield from scanner.accept(_KEY)
        if not name or (not found and (name not in self.tools or not (yield from _ends_here(scanner)))):
            raise Malformed
        sink.begin_call(name)
        yield from self._parameters(scanner, sink, name, found)
        sink.end_call()

    def _parameters(self, scanner: Scanner, sink: CallSink, name: str, found: str) -> Step[None]:
        schema = self.tools.get(name, {})
        properties = properties_of(schema)
        before, left = "{", set(properties)
        while found == _KEY:
            while (yield from scanner.accept(_KEY)):
                pass  # some models write a tag twice
            key = yield from read_name(scanner, _TAGS, properties)
            left.discard(key)
            names = left if properties else None
            yield from scanner.space()
            while (yield from scanner.accept(_KEY_END, _VALUE)) == _KEY_END:
                yield from scanner.space()
            if key:
                sink.arguments(f'{before}"{escaped(key)}": ')
                types = types_of(properties.get(key), schema)
                found = yield from read_typed(scanner, _TAGS, sink.arguments, types, names)
                before = ", "
            else:
                found = yield from read_text(scanner, _TAGS, lambda text: None, names, block=False)
            if found == _TAGS.close:
                yield from scanner.space()
                found = yield from scanner.accept(_KEY)
                if not found and (scanner.cut_off or (yield from _ends_here(scanner)) is None):
                    raise Malformed  # further parameters may be missing
        sink.arguments("{}" if before == "{" else "}")


def _ends_here(scanner: Scanner) -> Step[bool | None]:
    """Returns None at the end of the text."""

    def decide(text: str, whole: bool) -> bool | None:
        return text == _END if whole or not _END.startswith(text) else None

    return (yield from scanner.ahead(len(_END), decide))
