# ruff: noqa: E501
"""Tool calls that were lost or changed: the format of each family, values with tags in them, Python literals, broken
elements, calls in reasoning that never ends, and the tags that models vary. Each is cut at every place."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hybridrt.chat.chat import Chat
from hybridrt.chat.constraints import Constraints
from hybridrt.chat.registry import TOOL_PARSERS, choose
from hybridrt.chat.schemas import types_of
from hybridrt.chat.tools import read_tools
from hybridrt.models.config.family_registry import KNOWN_FAMILIES
from tests.support.levels import sweep
from tests.support.scripted_llm import byte_tokenizer
from tests.support.tool_calls import (
    ARGUMENTS,
    GLM,
    HERMES,
    JSON,
    KIMI,
    PYTHON,
    QWEN,
    TOOLS,
    glm,
    objects,
    qwen,
    read_everywhere,
)

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
    ("BailingMoeV2_5ForCausalLM", '<tool_call>\n{"name": N, "arguments": A}\n</tool_call>', "hermes", HERMES),
    ("FalconH1ForCausalLM", "<tool_call>{{ call | tojson }}</tool_call>", "hermes", HERMES),
    ("NemotronHForCausalLM", "<tool_call>\n<function=F>\n<parameter=P>\nvalue\n</parameter>", "qwen3_coder", QWEN),
    ("NemotronHForCausalLM", "Use <TOOLCALL>[...]</TOOLCALL>.", "nemotron", f"<TOOLCALL>[{JSON}]</TOOLCALL>"),
    ("NemotronHPuzzleForCausalLM", "<tool_call><function=F><parameter=P>value</parameter>", "qwen3_coder", QWEN),
    ("Lfm2ForCausalLM", "List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"),
    ("Lfm2MoeForCausalLM", '"<|tool_call_start|>[" + calls + "]<|tool_call_end|>"', "lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>"),
    ("Lfm3ForCausalLM", "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>", "qwen3_coder", QWEN),
    # As the models that the text parts are.
    ("MiniCPMV4_6ForConditionalGeneration", "<tool_call>\n<function=F>\n<parameter=P>", "qwen3_coder", QWEN),
    ("NemotronH_Omni_Reasoning_V3", "<tool_call>\n<function=F>\n<parameter=P>\nvalue", "qwen3_coder", QWEN),
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
    (
        "GptOssForCausalLM",
        '{{- "<|start|>assistant to=" }}{{- "functions." + name + "<|channel|>commentary " }}{{- "<|call|>" }}',
        "harmony",
        f"<|channel|>commentary to=functions.note <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>",
    ),
    ("LaraMiniForCausalLM", None, "", ""),
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


OPENINGS = ("<|tool_call|>", "<tool_call>")
CLOSINGS = ("", "</tool_call>", "\n</tool_call>\n", "<|/tool_call|>", "</|tool_call|>")


@pytest.mark.parametrize(("opening", "closing"), sweep(product(OPENINGS, CLOSINGS), 3))
def test_a_closing_tag_of_granite_is_no_text(opening: str, closing: str) -> None:
    content, _, calls = read_everywhere("granite", f"I write it.\n{opening}[{JSON}]{closing}", step=1)
    assert (content, objects(calls)) == ("I write it.", [("note", ARGUMENTS)])
    content, _, calls = read_everywhere("granite", f"{opening}{JSON}{closing}{opening}[{JSON}]{closing}", step=1)
    assert (content, objects(calls)) == ("", [("note", ARGUMENTS)] * 2)


@pytest.mark.parametrize(("parser", "ends"), [("granite", ""), ("nemotron", ' GAP? "</TOOLCALL>"')])
def test_a_grammar_asks_for_the_closing_tag_that_a_template_writes(parser: str, ends: str) -> None:
    tools = read_tools([{"type": "function", "function": {"name": "note", "parameters": TOOLS["note"]}}])
    section = Constraints({})._section(tools, TOOL_PARSERS.load(parser)(TOOLS))
    assert section is not None and section[0] == f"section{ends}"


def test_every_family_is_in_the_table_and_the_documents() -> None:
    modules = {architecture: place.partition(":")[0] for architecture, place in KNOWN_FAMILIES.built_in.items()}
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
