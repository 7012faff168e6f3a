"""Grammars of calls with values between tags (`hybridrt.chat.tool_parsers.tagged_values`)."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrt.base.errors import RequestError
from hybridrt.chat.schemas import json_text, limited, named_arguments, options_of, resolved, types_of, with_definitions
from hybridrt.chat.tool_parsers.tagged_values import Tags, converted
from hybridrt.chat.tools import Tool


@dataclass(frozen=True)
class CallLayout:
    """How a grammar writes a call.

    The rule `free` is the text after the name of a function without a strict schema. The rule
    `value` is a text parameter with its closing tag.

    Attributes:
        name: the beginning of a call, from the tool's name.
        open: before a value, from the parameter's name.
        close: after a value.
        end: after the last parameter, or "".
    """

    tags: Tags
    name: Callable[[str], str]
    open: Callable[[str], str]
    close: str
    end: str

    def call(self, tool: Tool, rule: str, names: re.Pattern[str]) -> str:
        """The rule of a call. `names`: what the format reads as a parameter's name."""
        if not tool.strict:
            return f"{rule}: {self.name(tool.name)} free"
        parts = limited(
            self._parameter(key, schema, tool) + ("" if needed else "?")
            for key, (schema, needed) in named_arguments(tool, names).items()
        )
        return " ".join([f"{rule}:", self.name(tool.name), *parts, self.end])

    def _parameter(self, key: str, schema: Any, tool: Tool) -> str:
        root = tool.parameters
        schema = resolved(schema, root)
        options, types = options_of(schema), types_of(schema, root)
        if options is not None and (not types or "string" in types):
            texts = [text for text in map(_as_text, options) if not any(tag in text for tag in self.tags.inner)]
            texts = [text for text in texts if types == {"string"} or json.loads(converted(text, types)) in options]
            if not texts:
                raise RequestError(f"no value of {key} of {tool.name} can be written: leave strict out", "tools")
            value = f"({' | '.join(map(json_text, texts))}) {self.close}"
        elif not types or "string" in types:
            value = "value"
        else:
            value = f"%json {json_text(with_definitions(schema, root))} {self.close}"
        return f"({self.open(key)} {value})"


def _as_text(option: Any) -> str:
    return option if isinstance(option, str) else json_text(option)
