"""Grammars of answers: forced calls, strict arguments, forms, and reasoning before them."""

from typing import Any

import pytest

from hybridrt.base.errors import GrammarError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.tool_parser import ToolParser
from hybridrt.chat.tool_parsers.kimi_k2 import KimiK2
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.matcher import Matcher
from hybridrt.engine.text.tokenizer import HFTokenizer
from tests.support.chat_samples import TOOLS
from tests.support.scripted_llm import END, byte_tokenizer

USER = {"role": "user", "content": "Hi"}
PARAMS = SamplingParams()
STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"A": {"enum": ["x", "y"]}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": "now"}}
THINKING = {"enable_thinking": True}
JSON = StructuredOutputs(json={"type": "integer"})
CASES: list[tuple[dict[str, Any], StructuredOutputs | None, str, bool]] = [
    ({"tool_choice": "required"}, None, '[{"name": "pick", "arguments": {"a": "x"}}]', True),
    ({"tool_choice": "required"}, None, '[{"name": "pick", "arguments": {"a": "z"}}]', False),
    ({"tool_choice": "required"}, None, '<think>so</think>\n\n[{"name": "now", "arguments": {}}]', True),
    ({"tool_choice": "required"}, None, "So", False),
    ({"tool_choice": "required"}, None, "[]", False),
    ({"tool_choice": "required", "parallel_tool_calls": False}, None, '[{"name": "now", "arguments": {}}, ', False),
    ({"tool_choice": NAMED}, None, '[{"name": "now", "arguments": {}}]', True),
    ({"tool_choice": NAMED}, None, '[{"name": "pick"', False),
    (
        {"tool_choice": NAMED, "chat_template_kwargs": THINKING},
        None,
        'so</think>[{"name": "now", "arguments": {}}]',
        True,
    ),
    ({}, None, 'Hi <tool_call>{"name": "pick", "arguments": {"a": "y"}}</tool_call> and', True),
    ({}, None, '<tool_call>{"name": "pick", "arguments": {"a": "z"}}', False),
    ({"tools": None, "thinking_budget": 4, "chat_template_kwargs": THINKING}, None, "abcd</think>Hi<tool_call>", True),
    ({"tools": None, "thinking_budget": 4, "chat_template_kwargs": THINKING}, None, "abcde", False),
    ({"tools": None, "thinking_budget": 0, "chat_template_kwargs": THINKING}, None, "</think>Hi", True),
    ({"tools": None, "thinking_budget": 2}, None, "<think>abc", False),
    ({"tools": None, "thinking_budget": 2}, None, "Hi", True),
    ({}, JSON, "12", True),
    ({}, JSON, "So", False),
    ({"tool_choice": "none"}, JSON, "12", True),
    ({"tool_choice": "none"}, JSON, "<tool_call>", False),
    ({}, JSON, '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "now"}', False),
    ({}, JSON, '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n', True),
    ({}, JSON, '<tool_call>{"name": "now", "arguments": {}}</tool_call>12', False),
    ({}, JSON, '<tool_call>{"name": "pick", "arguments": {"a": "z"', False),
    (
        {"chat_template_kwargs": THINKING},
        JSON,
        'so</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        True,
    ),
    ({"tools": None, "chat_template_kwargs": THINKING}, JSON, "so</think>\n12", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(regex="[a/]+"), "so</think>a/a", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(regex="a\\/\nb"), "so</think>a/\nb", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(choice=["é"]), "so</think>é", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(choice=["é"]), "so</think>\n\n é", False),
    (
        {"tools": None, "chat_template_kwargs": THINKING},
        StructuredOutputs(choice=[f"{i}, so" for i in range(3000)]),
        "so</think>2999, so",
        True,
    ),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(grammar='start: "x"'), "so</think>x", True),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return compiler_of(byte_tokenizer())


def compiler_of(tokenizer: HFTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer.hf), [tokenizer.hf.convert_tokens_to_ids(END)])


def takes(matcher: Matcher, tokens: list[int]) -> bool:
    """Whether these tokens may come."""
    try:
        for token in tokens:
            matcher.advance(token)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize(("options", "given", "text", "taken"), CASES, ids=range(len(CASES)))
def test_grammars_of_answers(
    options: dict[str, Any], given: StructuredOutputs | None, text: str, taken: bool, compiler: GrammarCompiler
) -> None:
    tokenizer = byte_tokenizer()
    chat = Chat(tokenizer, tool_parser="hermes", reasoning_parser="think")
    talk = read_conversation([USER], **({"tools": [STRICT, TOOLS[1]]} | options))
    wanted = chat.prompt(talk, SamplingParams(structured_outputs=given)).params.structured_outputs
    assert wanted is not None
    matcher = compiler.matcher(wanted)
    fits = takes(matcher, tokenizer.encode_bare(text))
    assert fits == taken and (not taken or matcher.inner.is_accepting())


KIMI_MORE, SO, KIMI_END = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI = f"<|tool_calls_section_begin|>{KIMI_MORE}"
KIMI_TAGS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", SO, KIMI_END)
GOOD = '{"a": "x", "n": [1], "t": ""}'
PICK = "<tool_call>\n<function=pick>\n"
OTHERS: list[tuple[str, str, bool]] = [
    ("qwen3_coder", f"So.{PICK}<parameter=a>\nx\n</parameter>\n</function>\n</tool_call> And", True),
    ("qwen3_coder", f"{PICK}<parameter=a>\nz", False),
    ("qwen3_coder", f"{PICK}</function>", False),
    (
        "qwen3_coder",
        f'{PICK}<parameter=a>\ny\n</parameter>\n<parameter=n>\n[1, 2]\n</parameter>\n<parameter=t>\nany "text"'
        "\n\n</parameter>\n</function></tool_call>",
        True,
    ),
    ("qwen3_coder", f"{PICK}<parameter=a>\ny\n</parameter>\n<parameter=n>\n[1, t", False),
    ("qwen3_coder", "<tool_call><function=now>\n<parameter=b>\n1\n</parameter>\n</function></tool_call>", True),
    ("qwen3_coder", "<tool_call><function=now>\nb", False),
    ("nemotron", 'So. <TOOLCALL>[{"name": "pick", "arguments": {"a": "x"}}]</TOOLCALL> And', True),
    ("nemotron", '<TOOLCALL>[{"name": "pick", "arguments": {"a": "z"', False),
    ("jamba", "So.", True),
    ("lfm2", 'So.<|tool_call_start|>[pick(a="x", n=[1, 2], t="any"), now(b=1)]<|tool_call_end|>And', True),
    ("lfm2", '<|tool_call_start|>[pick(a="z"', False),
    ("lfm2", "<|tool_call_start|>[pick()", False),
    ("lfm2", '<|tool_call_start|>[pick(a="x", t="any")]<|tool_call_end|>', True),
    ("lfm2", '<|tool_call_start|>[pick(a="x", t="any", n', False),
    ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>", True),
    (
        "kimi_k2",
        f"So.{KIMI}pick:0{SO}{GOOD}{KIMI_END}{KIMI_MORE}now:12{SO}{{}}{KIMI_END}<|tool_calls_section_end|> And",
        True,
    ),
    ("kimi_k2", f'{KIMI}pick:0{SO}{{"a": "z', False),
    ("kimi_k2", f"{KIMI}pack", False),
    ("kimi_k2", f"{KIMI}now:0{SO}[", False),
    ("kimi_k2", f"{KIMI}now:0{SO}{{}}{KIMI_END}{KIMI_END}", False),
]


@pytest.mark.parametrize(("parser", "text", "taken"), OTHERS, ids=range(len(OTHERS)))
def test_strict_arguments_in_other_formats(parser: str, text: str, taken: bool, compiler: GrammarCompiler) -> None:
    holds_to_the_schema(parser, text, taken, byte_tokenizer(), compiler)


@pytest.mark.parametrize(("parser", "text", "taken"), OTHERS[-5:], ids=range(5))
def test_strict_arguments_between_tags_that_are_tokens(parser: str, text: str, taken: bool) -> None:
    tokenizer = byte_tokenizer(KIMI_TAGS)
    assert len(tokenizer.encode_bare("".join(KIMI_TAGS))) == len(KIMI_TAGS)
    holds_to_the_schema(parser, text, taken, tokenizer, compiler_of(tokenizer))


def holds_to_the_schema(parser: str, text: str, taken: bool, tokenizer: HFTokenizer, compiler: GrammarCompiler) -> None:
    function = STRICT["function"]
    properties = function["parameters"]["properties"] | {
        "n": {"items": {"type": "integer"}, "type": "array"},
        "t": {"type": "string"},
    }
    parameters = function["parameters"] | {"properties": properties}
    tools = [STRICT | {"function": function | {"parameters": parameters}}, TOOLS[1]]
    wanted = Chat(tokenizer, tool_parser=parser).prompt(read_conversation([USER], tools), PARAMS).params
    assert wanted.structured_outputs is not None
    matcher = compiler.matcher(wanted.structured_outputs)
    fits = takes(matcher, tokenizer.encode_bare(text))
    assert fits == taken and (not taken or matcher.inner.is_accepting())


ALIKE = {"anyOf": [{"$ref": "#/$defs/A"}] * 100}
MANY = {f"p{i}": {"$ref": "#/$defs/A"} for i in range(300)}


@pytest.mark.parametrize("parser", ["qwen3_coder", "lfm2"])
@pytest.mark.parametrize(
    ("properties", "part", "text"),
    [
        ({"a": ALIKE}, ALIKE, "pick"),
        ({f"p{i}": {} for i in range(700)}, {}, "p699"),
        (MANY, {"enum": ["x" * 2000]}, "too large"),
        (MANY | {"p0": {"enum": ["x" * 3000]}}, {"$ref": "#/properties/p0"}, "too large"),
    ],
)
def test_small_schemas_make_no_large_grammars(
    parser: str, properties: dict[str, Any], part: dict[str, Any], text: str
) -> None:
    """Without limits the first case takes hours, and the others gigabytes with some more properties."""
    schema = {"type": "object", "properties": properties, "$defs": {"A": part}}
    talk = read_conversation([USER], [STRICT | {"function": STRICT["function"] | {"parameters": schema}}])
    try:
        params = Chat(byte_tokenizer(), tool_parser=parser).prompt(talk, PARAMS).params
        found = str(params.structured_outputs)
    except RequestError as e:
        found = str(e)
    assert text in found and len(found) < 2**18, len(found)


def test_without_a_wish_there_is_no_grammar() -> None:
    chat = Chat(byte_tokenizer(), tool_parser="hermes", reasoning_parser="think")
    assert chat.prompt(read_conversation([USER], TOOLS), PARAMS).params.structured_outputs is None
    given = SamplingParams(structured_outputs=JSON)
    assert Chat(byte_tokenizer()).prompt(read_conversation([USER]), given).params is given


def test_what_a_format_cannot_do_is_refused() -> None:
    with pytest.raises(RequestError, match="leave strict out"):
        plain = Chat(byte_tokenizer(), tool_parser="kimi_k2")
        plain.tool_parser = type("Plain", (KimiK2,), {"section_rules": ToolParser.section_rules})
        plain.prompt(read_conversation([USER], [STRICT]), PARAMS)
    with pytest.raises(RequestError, match="a thinking budget needs"):
        Chat(byte_tokenizer()).prompt(read_conversation([USER], thinking_budget=5), PARAMS)
    sentences = Chat(byte_tokenizer(), template="Here is my thought process:", reasoning_parser="granite")
    with pytest.raises(RequestError, match="single tokens"):
        sentences.prompt(read_conversation([USER], thinking_budget=5), PARAMS)


@pytest.mark.parametrize("parser", ["qwen3_coder", "lfm2"])
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("pick", {"allOf": [{"required": ["a"]}]}, "allOf"),
        ("pick", {"maxProperties": 1}, "maxProperties"),
        ("pick", {"properties": {"a>b": {}}}, "'a>b'"),
        ("pick", {"properties": {"": {}}}, "property ''"),
        ("pick", {"required": ["b"]}, "undescribed property 'b'"),
        ("pick>(", {}, "no room for the name"),
    ],
)
def test_a_schema_that_is_written_one_argument_at_a_time_is_enforced_or_refused(
    parser: str, name: str, change: dict[str, Any], text: str
) -> None:
    parameters = {"type": "object", "properties": {"a": {}}} | change
    tool = {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
    with pytest.raises(RequestError, match=text) as error:
        Chat(byte_tokenizer(), tool_parser=parser).prompt(read_conversation([USER], [tool]), PARAMS)
    assert error.value.field == "tools"


def test_a_value_that_its_format_cannot_write_is_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["</parameter>", "<parameter=b>"]}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    with pytest.raises(RequestError, match="no value of a of f"):
        Chat(byte_tokenizer(), tool_parser="qwen3_coder").prompt(read_conversation([USER], [tool]), PARAMS)
