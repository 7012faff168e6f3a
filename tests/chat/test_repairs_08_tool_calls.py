# ruff: noqa: E501
"""Tool calls that were lost or changed: the format of each family, values with tags in them, Python literals, broken
elements, calls in reasoning that never ends, and the tags that models vary. Each is cut at every place."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.answer_reader import AnswerReader, TokenTags
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import ChatMessage
from hybridrt.chat.reasoning import THINK
from hybridrt.chat.registry import TOOL_PARSERS, choose
from hybridrt.chat.scanner import Scanner
from hybridrt.chat.schemas import types_of
from hybridrt.families.registry import all_families
from hybridrt.sampling_params import SamplingParams
from tests.support.scripted_llm import byte_tokenizer

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
# Architecture: what its published template has to say about calls, in our words; the format; a call in it. None: no
# published template of the family shows tools.
FAMILY_FORMATS: list[tuple[str, str | None, str, str]] = [
    (
        "Qwen3_5ForCausalLM",
        "Answer: <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter></function>",
        "qwen3_coder",
        QWEN,
    ),
    ("Qwen3NextForCausalLM", '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>', "hermes", HERMES),
    ("GraniteMoeHybridForCausalLM", '<tool_call>\n{"name": N, "arguments": A}\n</tool_call>', "hermes", HERMES),
    (
        "OlmoHybridForCausalLM",
        "Write calls within <function_calls></function_calls>.",
        "olmo",
        f"<function_calls>{PYTHON}</function_calls>",
    ),
    ("KimiLinearForCausalLM", "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2", KIMI),
    ("BailingHybridForCausalLM", "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>V</arg_value></tool_call>", "glm", GLM),
    ("BailingMoeV3ForCausalLM", "<tool_call>{N}\n<arg_key>{K}</arg_key>\n<arg_value>{V}</arg_value>", "glm", GLM),
    ("BailingMoeV2_5ForCausalLM", "<tool_call>{N}<arg_key>{K}</arg_key><arg_value>{V}</arg_value>", "glm", GLM),
    ("FalconH1ForCausalLM", "<tool_call>{{ call | tojson }}</tool_call>", "hermes", HERMES),
    ("NemotronHForCausalLM", "<tool_call>\n<function=F>\n<parameter=P>\nvalue\n</parameter>", "qwen3_coder", QWEN),
    ("NemotronHForCausalLM", "Use <TOOLCALL>[...]</TOOLCALL>.", "nemotron", f"<TOOLCALL>[{JSON}]</TOOLCALL>"),
    ("NemotronHPuzzleForCausalLM", "<tool_call><function=F><parameter=P>value</parameter>", "qwen3_coder", QWEN),
    ("Lfm2ForCausalLM", "List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"),
    ("Lfm2MoeForCausalLM", '"<|tool_call_start|>[" + calls + "]<|tool_call_end|>"', "lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"),
    ("JambaForCausalLM", "<tool_calls>[\n{{ calls }}]</tool_calls>", "jamba", f"<tool_calls>[\n    {JSON}\n]</tool_calls>"),
    (
        "MiniMaxM1ForCausalLM",
        "system tool_setting=tools\n<tool_calls>\n{{ call }}\n</tool_calls>",
        "minimax_m1",
        f"<tool_calls>\n{JSON}\n</tool_calls>",
    ),
    (
        "MiniMaxText01ForCausalLM",
        "system function_setting=functions\n{{ functions }}",
        "minimax_text",
        '<function_call>```typescript\nfunctions.note({"text": "buy oats & <rye>", "count": 3})\n```',
    ),
    ("BambaForCausalLM", None, "", ""),
    ("Zamba2ForCausalLM", None, "", ""),
    ("MambaForCausalLM", None, "", ""),
    ("Mamba2ForCausalLM", None, "", ""),
    ("FalconMambaForCausalLM", None, "", ""),
    ("SwaSsmForCausalLM", '<tool_call>{"name": N, "arguments": A}</tool_call>', "hermes", HERMES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "parser", "text"),
    [(template, parser, text) for _, template, parser, text in FAMILY_FORMATS if template is not None],
    ids=[f"{family} {parser}" for family, template, parser, _ in FAMILY_FORMATS if template is not None],
)
def test_the_format_of_a_family_is_found_and_read_at_every_cut(template: str, parser: str, text: str) -> None:
    found = choose(TOOL_PARSERS, "auto", template)
    assert found is TOOL_PARSERS.load(parser)
    content, _, calls = read_everywhere(parser, f"I write it.\n{text}", step=1)
    assert (content, objects(calls)) == ("I write it.", [("note", ARGUMENTS)])


def test_every_family_is_in_the_table_and_the_documents() -> None:
    modules = {architecture: place.partition(":")[0] for architecture, place in all_families().built_in.items()}
    modules["NemotronHForCausalLM"] = "nemotron_h"
    assert {modules[architecture] for architecture, *_ in FAMILY_FORMATS} == {*modules.values()}
    text = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
    for _, template, parser, _ in FAMILY_FORMATS:
        assert template is None or re.search(rf"^\| `{parser}` \|", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("vocabulary", "parser"),
    [
        (["<|tool_call_start|>", "<|tool_call_end|>"], "Lfm2"),
        (["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], "Glm"),
        (["<|tool_call_begin|>", "<|tool_call_argument_begin|>"], "KimiK2"),
        (["<tool_call>", "</tool_call>"], None),
        ([], None),
    ],
)
def test_the_vocabulary_tells_the_format_where_the_template_shows_none(
    vocabulary: list[str], parser: str | None
) -> None:
    found = choose(TOOL_PARSERS, "auto", "List of tools: {{ tools | tojson }}", vocabulary)
    assert (found and found.__name__) == parser
    assert choose(TOOL_PARSERS, "auto", "<TOOLCALL>", vocabulary) is TOOL_PARSERS.load("nemotron")


def test_a_chat_looks_at_the_vocabulary() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.hf.add_tokens(["<|tool_call_start|>", "<|tool_call_end|>"], special_tokens=True)
    assert Chat(tokenizer, template="Tools: {{ tools }}").tool_parser is TOOL_PARSERS.load("lfm2")


def qwen(*parameters: tuple[str, str]) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=note>\n{parts}</function>\n</tool_call>"


def glm(*parameters: tuple[str, str]) -> str:
    parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters)
    return f"<tool_call>note\n{parts}</tool_call>"


TEXTS = [
    "a block ends with </parameter> here",
    "var s = '</function>' + x;",
    "all of </parameter></function></tool_call> in a line",
    "</parameter>",
    "</function>",
    "a </tool_call> b <tool_call> c <function=z> d <parameter=name> e",
    "a line\n</parameter>\nand more",
    "a line\n</function>\nand more",
    "a line\n<parameter=other>\nand more",
    '<cfg>\n<parameter name="k">\nv\n</parameter>\n<parameter name="l">w</parameter>\n</cfg>',
    "An example:\n" + qwen(("a", "1"), ("b", "2")) + "\nThat was it.",
    qwen(("a", "1")),
    "",
    "\n\n",
    " x ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_keeps_the_tags_that_it_holds(text: str) -> None:
    """Whether another parameter, another call, text or nothing follows."""
    for call, wanted in (
        (qwen(("text", text), ("name", "n.md")), [{"text": text, "name": "n.md"}]),
        (qwen(("name", "n.md"), ("text", text)), [{"name": "n.md", "text": text}]),
        (qwen(("text", text)) + "\n" + qwen(("name", "m")), [{"text": text}, {"name": "m"}]),
    ):
        for end in ("", "\nDone."):
            content, _, calls = read_everywhere("qwen3_coder", call + end)
            assert ([arguments for _, arguments in objects(calls)], content.strip()) == (wanted, end.strip())


@pytest.mark.parametrize(
    "text", ["see </arg_value> and", "see </tool_call> and", "<arg_key>name</arg_key> is a tag", "", "\n x \n", "a <tool_call> b </tool_call> c"],
)  # fmt: skip
def test_text_between_arg_tags_keeps_the_tags_that_it_holds(text: str) -> None:
    for call, wanted in (
        (glm(("text", text), ("name", "n.md")), [{"text": text, "name": "n.md"}]),
        (glm(("text", text)) + "\n" + glm(("name", "m")), [{"text": text}, {"name": "m"}]),
    ):
        assert [arguments for _, arguments in objects(read_everywhere("glm", call)[2])] == wanted


@pytest.mark.parametrize(
    "broken",
    [
        "<parameter=\nls -la\n</parameter>\n",
        "<parameter=ids: [1, 2]\n</parameter>\n",
        "<parameter=ids=\n</parameter>\n",
        "<parameter=>\nls\n</parameter>\n",
        "<parameter>\nls\n</parameter>\n",
        "<parameter=two words>\nls\n</parameter>\n",
        "<parameter=a<b>\nls\n</parameter>\n",
        f"<parameter={'k' * 300}>\nls\n</parameter>\n",
    ],
)
def test_a_broken_parameter_is_dropped_and_the_others_are_kept(broken: str) -> None:
    whole = "<parameter=text>\nx\n</parameter>\n"
    for inner in (broken + whole, whole + broken, broken + whole + broken):
        text = f"<tool_call>\n<function=note>\n{inner}</function>\n</tool_call>"
        assert objects(read_everywhere("qwen3_coder", text)[2]) == [("note", {"text": "x"})]


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("glm", "<tool_call>note<arg_key>text</arg_key></arg_key><arg_value>a</arg_value></tool_call>", {"text": "a"}),
        ("glm", "<tool_call>note<arg_key><arg_key>text</arg_key><arg_value>a</arg_value></tool_call>", {"text": "a"}),
        ("glm", "<tool_call>note<arg_key>text</arg_key>a</arg_value></tool_call>", {"text": "a"}),
        ("glm", "<tool_call>note<arg_key>text</arg_key><arg_value>a</tool_call>", {"text": "a"}),
        ("glm", "<tool_call>note<arg_key>text</arg_key><arg_value>a<arg_key>count</arg_key><arg_value>3</tool_call>", {"text": "a", "count": 3}),
        ("glm", "<tool_call>note\n</tool_call>", {}),
        ("glm", f"<tool_call>{JSON}</tool_call>", ARGUMENTS),
        ("qwen3_coder", f"<tool_call>\n{JSON}\n</tool_call>", ARGUMENTS),
        ("qwen3_coder", "<function=note><parameter=text>a</parameter><parameter=count>3</parameter></function></tool_call>", {"text": "a", "count": 3}),
        ("qwen3_coder", "<tool_call>\n<function=note>\n<parameter=text>\na\n</function>\n</tool_call>", {"text": "a"}),
        ("hermes", '<tool_call>{{"name": "note", "arguments": {"text": "a"}}}</tool_call>', {"text": "a"}),
        ("hermes", '<tool_call>{{"name": "note", "arguments": {{"text": "a"}}}}</tool_call>', {"text": "a"}),
        ("hermes", '<tool_call>{"name": "note", "arguments": {"size": {{"w": 1}}}}</tool_call>', {"size": {"w": 1}}),
        ("hermes", '<tool_call>{"name": "note", "arguments": {"text": "a"}}}}</tool_call>', {"text": "a"}),
        ("hermes", f"<tool_calls>\n[{JSON}\n</tool_calls>", ARGUMENTS),
        ("jamba", f"<tool_call>{JSON}</tool_call>", ARGUMENTS),
        ("nemotron", f"<TOOLCALL>[{JSON}</TOOLCALL>", ARGUMENTS),
        ("kimi_k2", KIMI.replace("calls_section", "call_section"), ARGUMENTS),
        ("kimi_k2", KIMI.replace("<|tool_calls_section_begin|>", "").replace("<|tool_calls_section_end|>", ""), ARGUMENTS),
        ("kimi_k2", KIMI.replace("<|tool_call_end|>", ""), ARGUMENTS),
        ("olmo", f"<function_call>\n{PYTHON}\n</function_call>", ARGUMENTS),
        ("lfm2", f"<|tool_call_start|>[{PYTHON}<|tool_call_end|>", ARGUMENTS),
        ("lfm2", "<|tool_call_start|>[note(size={{'w': 1}})]<|tool_call_end|>", {"size": {"w": 1}}),
    ],
)  # fmt: skip
def test_tags_that_models_vary(parser: str, text: str, arguments: dict[str, Any]) -> None:
    content, _, calls = read_everywhere(parser, text)
    assert (content, objects(calls)) == ("", [("note", arguments)])


def test_several_calls_follow_each_other_in_each_format() -> None:
    for parser, text in (
        ("glm", "<tool_call>now</tool_call>\n" * 2),
        ("olmo", "<function_calls>\nnow()\nnow()\n</function_calls>"),
        ("minimax_m1", '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_calls>'),
        ("minimax_text", "<function_call>```typescript\nfunctions.now()\nfunctions.now({})\n```"),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>" * 2),
    ):  # fmt: skip
        content, _, calls = read_everywhere(parser, text)
        assert (content, calls) == ("", [("now", "{}")] * 2)


@pytest.mark.parametrize("text", ["Write <tool_call>name</tool_call>.", "<tool_call>no name<arg_key>", "<function_calls>so</function_calls>", "<function_call>f</function_call>"])  # fmt: skip
def test_text_that_is_no_call_stays_content(text: str) -> None:
    for parser in ("glm", "olmo", "minimax_text"):
        assert read_everywhere(parser, text) == (text, "", [])


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


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("size", '{"w": 3}', {"w": 3}),
        ("size", "{'w': 3}", {"w": 3}),
        ("tags", '["a"]', ["a"]),
        ("any", '{"w": [1]}', {"w": [1]}),
        ("any", "[]", []),
        ("unknown", " {}", {}),
        ("any", "17", "17"),
        ("any", "true", "true"),
        ("any", "[x", "[x"),
        ("size", "[1]", "[1]"),
        ("text", '{"w": 3}', '{"w": 3}'),
    ],
)
def test_a_schema_without_a_type(key: str, text: str, value: Any) -> None:
    for parser, written in (("qwen3_coder", qwen((key, text))), ("glm", glm((key, text)))):
        assert objects(read_everywhere(parser, written)[2]) == [("note", {key: value})]


def test_types_by_their_names_in_python() -> None:
    for name, type_ in (("dict", "object"), ("list", "array"), ("int", "integer"), ("float", "number"), ("bool", "boolean"), ("str", "string")):  # fmt: skip
        assert types_of({"type": name}, {}) == {type_}
    assert types_of({"prefixItems": []}, {}) == {"array"} and types_of({"additionalProperties": False}, {}) == {
        "object"
    }


ENDINGS = [
    (QWEN, "qwen3_coder"), (HERMES, "hermes"), (GLM, "glm"), (KIMI, "kimi_k2"), (KIMI[len("<|tool_calls_section_begin|>") :], "kimi_k2"),
    (f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>", "lfm2"), (f"<function_calls>{PYTHON}</function_calls>", "olmo"),
    (QWEN[len("<tool_call>\n") :], "qwen3_coder"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "parser"), ENDINGS)
def test_a_call_ends_reasoning_that_no_tag_ends(call: str, parser: str) -> None:
    wanted = [("note", ARGUMENTS)]
    for text, inside in ((f"I keep this.\n\n{call}", True), (f"<think>\nI keep this. {call}\n", False)):
        content, reasoning, calls = read_everywhere(parser, text, inside)
        assert (content, reasoning, objects(calls)) == ("", "I keep this.", wanted)
    draft = f"A draft: {call}\nNo.\n"
    content, reasoning, calls = read_everywhere(parser, f"{draft}</think>\n\nHi {call}", True)
    assert (content, reasoning, objects(calls)) == ("Hi", draft.strip(), wanted)
    assert read_everywhere(parser, f"{draft}</think>Hi", True) == ("Hi", draft.strip(), [])
    content, reasoning, calls = read_everywhere(parser, f"{draft}{call}\n{call}", True)  # the last ones are meant
    assert (content, reasoning, objects(calls)) == ("", draft.strip(), wanted * 2)
    assert read_everywhere(parser, draft, True, truncated=True) == ("", draft.strip(), [])


@pytest.mark.parametrize(
    "text", ["I could write <tool_call> here.", "No <tool_call>{} and <function=f> are", "<tool_call>"]
)
def test_reasoning_that_names_a_tag_stays_reasoning_and_streams(text: str) -> None:
    for parser in ("hermes", "qwen3_coder", "glm"):
        assert read_everywhere(parser, text, True) == ("", text, [])
        answer = AnswerParser(TOOL_PARSERS.load(parser)(TOOLS), THINK, in_reasoning=True)
        shown = ChatMessage().extend(answer.feed(text + " And so on, for long."))
        assert shown.reasoning.startswith(text)


def test_reasoning_that_a_call_ends_is_counted() -> None:
    answer = AnswerParser(TOOL_PARSERS.load("hermes")(TOOLS), THINK, in_reasoning=True)
    reader = AnswerReader(answer, TokenTags(frozenset([1]), frozenset([2])), lambda text: [*text.encode()])
    reader.read(f"I keep this.\n{HERMES}", range(10, 90))
    reader.read("", (), "stop")
    assert (reader.reasoning_tokens, reader.finish_reason) == (len("I keep this."), "tool_calls")


def test_every_literal_that_opens_a_section_is_held_to_strict_schemas() -> None:
    """Else a model that writes another one would write what it likes."""
    from hybridrt.engine.grammar_compiler import GrammarCompiler
    from tests.support.scripted_llm import END

    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer.hf), [tokenizer.hf.convert_tokens_to_ids(END)])
    schema = {"type": "object", "properties": {"text": {"enum": ["x"]}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "note", "strict": True, "parameters": schema}}
    for name in ("qwen3_coder", "kimi_k2", "olmo"):
        kind = TOOL_PARSERS.load(name)
        talk = read_conversation([{"role": "user", "content": "Hi"}], [tool])
        wanted = Chat(tokenizer, tool_parser=name).prompt(talk, SamplingParams()).params.structured_outputs
        assert wanted is not None
        for opened in kind.opens:
            matcher = compiler.matcher(wanted).inner
            text = f"So: {opened}" + "?" * (opened == kind.opens[0])
            taken = all(matcher.consume_token(token) for token in tokenizer.encode_bare(text))
            assert not taken, (name, opened)


LOOKED_AT = 600  # no look goes further without reading what it passes


class CountingScanner(Scanner):
    """Counts the characters that are copied, and those that each look at the text may pass."""

    work = 0

    @property
    def _text(self) -> str:  # type: ignore[override]
        CountingScanner.work += min(LOOKED_AT, max(0, len(self._all) - getattr(self, "_place", 0)))
        return self._all

    @_text.setter
    def _text(self, text: str) -> None:
        CountingScanner.work += len(text)
        self._all = text


def floods() -> Iterator[tuple[str, str, bool | None]]:
    """Parser, the unit of an answer that repeats it, and where the answer begins."""
    texts = ["</parameter>", "\n</parameter>\n", "</function>", "<parameter=name>", "\n<function=x>", " ", "x", "\n"]
    for unit in (*texts, "</parameter></function></tool_call> "):
        yield "qwen3_coder", unit, None
    for unit in ("</arg_value>", "<arg_key>", "</tool_call> ", "<tool_call>"):
        yield "glm", unit, None
    for unit in ("'a' ", "\\", "((", "{{"):
        yield "lfm2", unit, None
    for unit in ("<tool_call>", '<tool_call>{"name": "now"', "<tool_call>\n<function=now>\n</function>", " ", "x"):
        yield "hermes", unit, True
        yield "qwen3_coder", unit, True
    yield "hermes", '<tool_call>{"arguments": {"a": 1', None


@pytest.mark.parametrize(("parser", "unit", "inside"), list(floods()))
def test_the_work_is_linear_in_the_length(
    parser: str, unit: str, inside: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("answer_parser", "drafts", "tool_parsers.tagged_values"):
        monkeypatch.setattr(f"hybridrt.chat.{module}.Scanner", CountingScanner)
    begins = {
        "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=text>\n",
        "glm": "<tool_call>note<arg_key>text</arg_key><arg_value>",
        "lfm2": "<|tool_call_start|>[note(any=",
        "hermes": "",
    }
    counts = []
    for length in (1200, 6000):
        CountingScanner.work = 0
        text = ("" if inside else begins[parser]) + unit * (length // len(unit))
        read(parser, [text[i : i + 4] for i in range(0, len(text), 4)], inside)
        counts.append(CountingScanner.work / len(text))
    assert counts[1] < 1.5 * counts[0] + 50, counts
