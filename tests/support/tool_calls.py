# ruff: noqa: E501
"""Calls of one tool in each format, and reading them however a stream is cut."""

import json
from collections.abc import Sequence
from typing import Any

from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.events import ChatMessage
from hybridrt.chat.reasoning import THINK
from hybridrt.chat.registry import TOOL_PARSERS

TOOLS: dict[str, Any] = {
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "name": {"type": "string"},
            "count": {"type": "integer"},
            "size": {"properties": {"w": {"type": "integer"}}},
            "tags": {"items": {"type": "string"}},
            "any": {"description": "Whatever."},
        },
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"text": "buy oats & <rye>", "count": 3}
Calls = list[tuple[str, str]]


def read(
    parser: str, pieces: Sequence[str], inside: bool | None = None, truncated: bool = False
) -> tuple[str, str, Calls]:
    """Content, reasoning and calls. inside: the answer begins in reasoning; None: there is none."""
    answer = AnswerParser(
        TOOL_PARSERS.load(parser)(TOOLS), None if inside is None else THINK, in_reasoning=bool(inside)
    )
    message = ChatMessage().extend([e for piece in pieces for e in answer.feed(piece)] + answer.finish(truncated))
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


def read_everywhere(
    parser: str, text: str, inside: bool | None = None, truncated: bool = False, step: int = 9
) -> tuple[str, str, Calls]:
    """As `read`, and asserts that it is the same when the text is cut at every place, and at each `step`-th alone."""
    whole = read(parser, [text], inside, truncated)
    for pieces in (list(text), *([text[:i], text[i:]] for i in range(1, len(text), step))):
        assert read(parser, pieces, inside, truncated) == whole, pieces
    return whole


def objects(calls: Calls) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


QWEN = "<tool_call>\n<function=note>\n<parameter=text>\nbuy oats & <rye>\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
JSON = '{"name": "note", "arguments": {"text": "buy oats & <rye>", "count": 3}}'
HERMES = f"<tool_call>\n{JSON}\n</tool_call>"
GLM = "<tool_call>note<arg_key>text</arg_key>\n<arg_value>buy oats & <rye></arg_value><arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
PYTHON = "note(text='buy oats & <rye>', count=3)"
KIMI = '<|tool_calls_section_begin|><|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>{"text": "buy oats & <rye>", "count": 3}<|tool_call_end|><|tool_calls_section_end|>'


def qwen(*parameters: tuple[str, str]) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=note>\n{parts}</function>\n</tool_call>"


def glm(*parameters: tuple[str, str]) -> str:
    parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters)
    return f"<tool_call>note\n{parts}</tool_call>"
