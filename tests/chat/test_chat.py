"""From conversations to prompts: checks, templates, detection, boundaries, and grammars of answers."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import NamedTool, read_conversation
from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS, choose
from hybridrt.chat.renderer import Renderer
from hybridrt.chat.tool_parser import ToolParser
from hybridrt.chat.tool_parsers.kimi_k2 import KimiK2
from hybridrt.engine.grammar_compiler import GrammarCompiler
from hybridrt.engine.tokenizer import HFTokenizer
from hybridrt.errors import CheckpointError, ConfigError, RequestError
from hybridrt.sampling_params import SamplingParams
from hybridrt.structured_outputs import StructuredOutputs
from tests.support.chat_samples import TOOLS
from tests.support.scripted_llm import END, byte_tokenizer

USER = {"role": "user", "content": "Hi"}
PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def rendering() -> Iterator[Renderer]:
    own = Renderer()
    yield own
    child = own._child
    own.close()
    assert child is not None and child.poll() is not None, "it has ended"


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "Hi"}, "messages", "at least one"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [USER, 5]}, "messages.1", "role and content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "text or"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0", "text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0", "function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON text",
        ),
        ({"tools": {}}, "tools", "list"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "without spaces"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools.0.function.parameters",
            "JSON schema",
        ),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "twice"),
        ({"tool_choice": "required"}, "tool_choice", "pass tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of tools",
        ),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "'auto'"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "minimal"),
        ({"thinking_budget": -1}, "thinking_token_budget", "from 0"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs", "no template variable"),
        ({"chat_template_kwargs": ["tools"]}, "chat_template_kwargs", "a mapping of names"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs", "a mapping of names"),
    ],
)
def test_a_malformed_conversation_is_refused(given: dict[str, Any], field: str | None, text: str) -> None:
    with pytest.raises(RequestError, match=text) as error:
        read_conversation(**({"messages": [USER]} | given))
    assert error.value.field == field


def test_messages_become_what_templates_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    broken = {"function": {"name": "now", "arguments": '{"a": '}}
    talk = read_conversation(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call, broken, {"function": {"name": "now"}}]},
        ],
        TOOLS,
        {"type": "function", "function": {"name": "now"}},
    )
    assert talk.messages[0] == {"role": "user", "content": "a\nb"}
    calls = talk.messages[1]["tool_calls"]
    assert talk.messages[1]["content"] == "" and calls[0]["id"] == "1"
    assert [c["function"]["arguments"] for c in calls] == [{"a": 1}, '{"a": ', {}]
    assert talk.tool_choice == NamedTool("now") and talk.tools[1].definition["function"]["description"] == ""
    assert not read_conversation([USER], TOOLS, "none").offered


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\n<function=example>\n<parameter=a>", "Qwen3Coder", None),
        ("'<tool_call>\n{\"name\": ' </think>", "Hermes", "</think>"),
        ("<TOOLCALL>[ <think></think>", "Nemotron", "</think>"),
        ("<tool_calls>[\n", "Jamba", None),
        ("<|tool_call|> <tool_call> Here is my thought process:", "Granite", "Here is my response:"),
        ("<|tool_call_start|>[", "Lfm2", None),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "KimiK2", None),
        ("{{ messages }}", None, None),
    ],
)
def test_parsers_are_found_by_the_template(template: str, tools: str | None, reasoning: str | None) -> None:
    found = choose(TOOL_PARSERS, "auto", template)
    assert (found and found.__name__) == tools
    tags = choose(REASONING_PARSERS, "auto", template)
    assert (tags and tags.closes[0]) == reasoning
    assert choose(TOOL_PARSERS, "none", template) is None


def test_an_unknown_parser_is_said_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"granite, hermes, jamba, kimi_k2, lfm2, nemotron, qwen3_coder"):
        Chat(byte_tokenizer(), tool_parser="llama")
    with pytest.raises(RequestError, match=r"--tool-parser.*hermes"):
        Chat(byte_tokenizer()).prompt(read_conversation([USER], TOOLS), PARAMS)


def test_the_child_process_renders_and_comes_back_when_it_is_killed(rendering: Renderer) -> None:
    def render(template: str) -> str:
        return rendering.render(template, [USER], {"x": "é" * 10})

    assert render("{{ messages[0].content }} {{ x }}") == "Hi " + "é" * 10
    child = rendering._child
    assert child is not None and render("{{ x * 100000 }}") == "é" * 1_000_000 and rendering._child is child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert render("{{ 1 + 1 }}") == "2"
    for template, text in (
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% import 'os' as os %}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ):
        with pytest.raises(CheckpointError, match=text):
            render(template)
        assert render("{{ 1 + 1 }}") == "2"
    with pytest.raises(RequestError, match="cannot be passed on"):
        rendering.render("x", [USER], {"x": object()})


def test_a_stopped_child_process_is_given_up(rendering: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the conversation is longer than what the pipe to it holds."""
    rendering.start()
    assert rendering._child is not None
    os.kill(rendering._child.pid, signal.SIGSTOP)
    monkeypatch.setattr("hybridrt.chat.renderer.TIMEOUT_S", 0.2)
    with pytest.raises(CheckpointError, match="has not ended within"):
        rendering.render("{{ messages[0].content }}", [{"role": "user", "content": "x" * 1_000_000}], {})
    assert rendering._child is None


@pytest.mark.slow
def test_a_template_has_little_time_and_memory(rendering: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for template, seconds, text in ((loop, 0.2, "has not ended within"), ("{{ [1] * 10**9 }}", 60.0, "MemoryError")):
        rendering.start()
        with monkeypatch.context() as patch:
            patch.setattr("hybridrt.chat.renderer.TIMEOUT_S", seconds)
            with pytest.raises(CheckpointError, match=text):
                rendering.render(template, [USER], {})
        assert rendering._child is None
    assert rendering.render("{{ 1 + 1 }}", [USER], {}) == "2"


def test_a_forked_process_leaves_the_child_process_to_its_parent(rendering: Renderer) -> None:
    rendering.start()
    child = rendering._child
    pid = os.fork()
    if pid == 0:
        rendering.after_fork()
        ended = 1
        try:
            ended = int(rendering.render("{{ 0 }}", [USER], {}))
            rendering.close()
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rendering.render("{{ 1 + 1 }}", [USER], {}) == "2" and rendering._child is child


def test_a_conversation_that_no_child_process_could_hold_is_refused(
    rendering: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrt.chat.renderer.MAX_BYTES", 1000)
    with pytest.raises(RequestError, match="there may be 1000"):
        rendering.render("x", [{"role": "user", "content": "x" * 1000}], {})


def test_the_child_process_can_open_no_file(rendering: Renderer) -> None:
    rendering.start()
    assert rendering._child is not None
    with open(f"/proc/{rendering._child.pid}/limits") as limits:
        (line,) = [line for line in limits if line.startswith("Max open files")]
    assert line.split()[3:5] == ["0", "0"]


def test_the_system_prompt_ends_at_a_boundary() -> None:
    chat = Chat(byte_tokenizer(), tool_parser="hermes")
    system = {"role": "system", "content": "Be brief. " * 5}
    for messages, tools, start in (
        ([system, USER], None, "Hi"),
        ([system, {"role": "user", "content": "?!"}], None, "!"),
        ([USER], TOOLS, "Hi"),
        ([system, USER, {"role": "assistant", "content": "x"}, USER], TOOLS, "Hi"),
    ):
        prompt = chat.prompt(read_conversation(messages, tools), PARAMS)
        text = chat.render(read_conversation(messages, tools))
        assert prompt.boundaries == (len(text[: text.index(start)].encode()),)
    assert chat.prompt(read_conversation([USER]), PARAMS).boundaries == ()
    refusing = Chat(byte_tokenizer(), template="{{ messages[3].content }}{{ messages[9].x.y }}")
    with pytest.raises(CheckpointError):
        refusing.prompt(read_conversation([system, USER]), PARAMS)
    long = Chat(byte_tokenizer(), template="{{ raise_exception('few') if messages | length < 3 }}{{ messages }}")
    assert long.prompt(read_conversation([system, USER, USER]), PARAMS).boundaries == ()


def test_reasoning_is_read_from_the_prompt_and_its_tokens_are_counted() -> None:
    tokenizer = byte_tokenizer()
    chat = Chat(tokenizer, reasoning_parser="think")
    said = "Hm.\n</think>\n\nHi"
    for options, text, tokens in (
        ({"chat_template_kwargs": {"enable_thinking": True}}, said, 5),
        ({}, "<think>" + said, 6),
        ({}, "Hi", 0),
    ):
        answer = chat.prompt(read_conversation([USER], **options), PARAMS).new_answer()
        for token in tokenizer.encode_bare(text):
            answer.read(tokenizer.decode([token]), [token])
        answer.read("", (), "stop")
        assert (answer.message.content, answer.reasoning_tokens, answer.finish_reason) == ("Hi", tokens, "stop")
    sentences = Chat(tokenizer, reasoning_parser="granite").prompt(read_conversation([USER]), PARAMS).new_answer()
    sentences.read("Here is my thought process: Hm. Here is my response: Hi", (), "length")
    assert sentences.message.reasoning == "Hm." or sentences.reasoning_tokens > 0


def test_effort_and_kwargs_reach_the_template() -> None:
    chat = Chat(byte_tokenizer(), template="{{ reasoning_effort }} {{ enable_thinking }} {{ x }}")
    assert chat.render(read_conversation([USER], reasoning_effort="high", chat_template_kwargs={"x": 1})) == "high  1"
    assert chat.render(read_conversation([USER], reasoning_effort="none")) == "none False "
    given = {"enable_thinking": True}
    assert "True" in chat.render(read_conversation([USER], reasoning_effort="none", chat_template_kwargs=given))


def test_special_tokens_of_a_format_stay_in_the_text_for_its_parser() -> None:
    special = Chat(byte_tokenizer(), tool_parser="lfm2").prompt(read_conversation([USER], TOOLS), PARAMS)
    assert not special.params.skip_special_tokens
    answer = special.new_answer()
    answer.read("<|pad|>a<|tool_call_start|>[now()]<|tool_call_end|><|pad|>", (), "stop")
    assert (answer.message.content, answer.message.tool_calls[0].name) == ("a", "now")
    plain = Chat(byte_tokenizer(), tool_parser="hermes").prompt(read_conversation([USER], TOOLS), PARAMS)
    assert plain.params is PARAMS


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
    ({"tools": None, "chat_template_kwargs": THINKING}, JSON, "so</think>\n12", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(regex="[a/]+"), "so</think>a/a", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(regex="a\\/\nb"), "so</think>a/\nb", True),
    ({"tools": None, "chat_template_kwargs": THINKING}, StructuredOutputs(choice=["é"]), "so</think>é", True),
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


@pytest.mark.parametrize(("options", "given", "text", "taken"), CASES, ids=range(len(CASES)))
def test_grammars_of_answers(
    options: dict[str, Any], given: StructuredOutputs | None, text: str, taken: bool, compiler: GrammarCompiler
) -> None:
    tokenizer = byte_tokenizer()
    chat = Chat(tokenizer, tool_parser="hermes", reasoning_parser="think")
    talk = read_conversation([USER], **({"tools": [STRICT, TOOLS[1]]} | options))
    wanted = chat.prompt(talk, SamplingParams(structured_outputs=given)).params.structured_outputs
    assert wanted is not None
    matcher = compiler.matcher(wanted).inner
    fits = all(matcher.consume_token(token) for token in tokenizer.encode_bare(text))
    assert fits == taken and (not taken or matcher.is_accepting())


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
    matcher = compiler.matcher(wanted.structured_outputs).inner
    fits = all(matcher.consume_token(token) for token in tokenizer.encode_bare(text))
    assert fits == taken and (not taken or matcher.is_accepting())


ALIKE = {"anyOf": [{"$ref": "#/$defs/A"}] * 100}
MANY = {f"p{i}": {"$ref": "#/$defs/A"} for i in range(300)}


@pytest.mark.parametrize("parser", ["qwen3_coder", "lfm2"])
@pytest.mark.parametrize(
    ("properties", "part", "text"),
    [
        ({"a": ALIKE}, ALIKE, "pick"),
        ({f"p{i}": {} for i in range(2000)}, {}, "p1999"),
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
    assert text in found and len(found) < 2**19, len(found)


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
