# ruff: noqa: E501
"""Values of tool calls in Python's syntax, as Python reads them, and numbers that JSON cannot hold."""

import json
from typing import Any

import pytest

from hybridrt.chat.registry import TOOL_PARSERS
from tests.support.tool_calls import glm, objects, qwen, read_everywhere

LITERALS: list[tuple[str, Any]] = [
    (r"'sed s/\//_/g names'", r"sed s/\//_/g names"),
    (r"'\033[1m \101BC \7 \1234'", "\033[1m ABC \7 S4"),
    (r"'\x41\u00e9\U0001F600\N{BULLET}\a\v\d\\ \''", "Aé😀•\a\v\\d\\ '"),
    ("'a\\\nb'", "ab"),
    ("'a\nb'", "a\nb"),
    (r"r'\d+\''", r"\d+\'"),
    (r"R'''\d'''", r"\d"),
    ("u'a' \"b\"\n'''c\n\"d'''", 'abc\n"d'),
    ('"""it\'s "q" so"""', 'it\'s "q" so'),
    ("''", ""),
    ("f'hello'", "hello"),
    ("rf'{{\\d}}' 'x'", "{\\d}x"),
    ("('a' 'b')", "ab"),
    ("('a',)", ["a"]),
    ("(1, 2)", [1, 2]),
    ("()", []),
    ("(5)", 5),
    ("{'a', 'b'}", ["a", "b"]),
    ("{'a': 1, 2: {3: None}, True: (1,),}", {"a": 1, "2": {"3": None}, "true": [1]}),
    ("{}", {}),
    ("[1, [True, false], null,]", [1, [True, False], None]),
    ("+7", 7),
    ("- 5", -5),
    ("--5", 5),
    ("1_000", 1000),
    ("0x1F", 31),
    ("-0b11", -3),
    ("0o17", 15),
    (".5", 0.5),
    ("5.", 5.0),
    ("-1e-3", -0.001),
    ("1_0.5E+2", 1050.0),
]


@pytest.mark.parametrize(("literal", "value"), LITERALS)
@pytest.mark.parametrize("parser", ["lfm2", "olmo"])
def test_python_literals_are_read_as_python_reads_them(parser: str, literal: str, value: Any) -> None:
    kind = TOOL_PARSERS.load(parser)
    text = f"{kind.opens[0]}note(any={literal} , count=1){kind.closes[0]}"
    assert objects(read_everywhere(parser, text)[2]) == [("note", {"any": value, "count": 1})]


@pytest.mark.parametrize(
    "literal",
    ["1e999", "-1e999", "9" * 400, "b'x'", "f'{x}'", "f'}'", "1j", "1+2j", "nan", "inf", "007", "x", "__import__('os')", "'a' + 'b'", "'\\xZZ'",
     "'\\N{NO SUCH}'", "{[1]: 2}", "{'a': 1, 'b'}", "[1 2]", "['a': 1]", "[" * 99 + "]" * 99, "(" * 99 + "1" + ")" * 99, "-" * 99 + "1"],
)  # fmt: skip
def test_what_is_no_literal_leaves_arguments_that_no_one_runs(literal: str) -> None:
    _, _, calls = read_everywhere("lfm2", f"<|tool_call_start|>[note(any={literal})]<|tool_call_end|>")
    for _, arguments in calls:
        with pytest.raises(ValueError):
            json.loads(arguments)


@pytest.mark.parametrize("parser", ["hermes", "lfm2", "qwen3_coder", "glm"])
def test_a_number_without_end_is_no_number(parser: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": "note", "arguments": {"count": 1e999}}</tool_call>',
        "lfm2": "<|tool_call_start|>[note(count=1e999)]<|tool_call_end|>",
        "qwen3_coder": qwen(("count", "1e999")),
        "glm": glm(("count", "1e999")),
    }[parser]
    for _, arguments in read_everywhere(parser, text)[2]:
        assert "1e999" not in arguments or '"1e999"' in arguments or not is_json(arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
