"""From conversations to prompts: checks, templates, detection and boundaries."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.base.errors import CheckpointError, ConfigError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS, choose
from hybridrt.chat.renderer import Renderer
from hybridrt.chat.tools import NamedTool
from tests.support.chat_samples import TOOLS
from tests.support.scripted_llm import byte_tokenizer

USER = {"role": "user", "content": "Hi"}
PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def rendering() -> Iterator[Renderer]:
    own = Renderer()
    yield own
    own.close()


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "Hi"}, "messages", "at least one"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [USER, 5]}, "messages.1", "role and content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "text or"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.image", "it must be"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content.0.type", "'x'; it must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages.0.content.0",
            "video .* supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "must be text"),
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
    assert talk.messages[0] == {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    calls = talk.messages[1]["tool_calls"]
    assert talk.messages[1]["content"] == "" and calls[0]["id"] == "1"
    assert [c["function"]["arguments"] for c in calls] == [{"a": 1}, {"arguments": '{"a": '}, {}]
    assert talk.tool_choice == NamedTool("now") and "description" not in talk.tools[1].definition["function"]
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
    with pytest.raises(ConfigError, match=r"glm, granite, harmony, hermes, .*, olmo, qwen3_coder"):
        Chat(byte_tokenizer(), tool_parser="llama")
    with pytest.raises(RequestError, match=r"--tool-parser.*hermes"):
        Chat(byte_tokenizer(), tool_parser="none").prompt(read_conversation([USER], TOOLS), PARAMS)


def test_the_child_process_renders_and_comes_back_when_it_is_killed(rendering: Renderer) -> None:
    def render(template: str) -> str:
        return rendering.render(template, [USER], {"x": "é" * 10})

    assert render("{{ messages[0].content }} {{ x }}") == "Hi " + "é" * 10
    assert render("{{ '<b>x' | striptags }}") == "x", "it needs a module that is imported first"
    child = rendering._child.process
    assert child is not None and render("{{ x * 100000 }}") == "é" * 1_000_000
    assert rendering._child.process is child
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
    assert rendering._child.process is not None
    os.kill(rendering._child.process.pid, signal.SIGSTOP)
    monkeypatch.setattr("hybridrt.chat.renderer.TIMEOUT_S", 0.2)
    with pytest.raises(CheckpointError, match="has not ended within"):
        rendering.render("{{ messages[0].content }}", [{"role": "user", "content": "x" * 1_000_000}], {})
    assert rendering._child.process is None


@pytest.mark.slow
def test_a_template_has_little_time_and_memory(rendering: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for template, seconds, text in ((loop, 0.2, "has not ended within"), ("{{ [1] * 10**9 }}", 60.0, "MemoryError")):
        rendering.start()
        with monkeypatch.context() as patch:
            patch.setattr("hybridrt.chat.renderer.TIMEOUT_S", seconds)
            with pytest.raises(CheckpointError, match=text):
                rendering.render(template, [USER], {})
        assert rendering._child.process is None
    assert rendering.render("{{ 1 + 1 }}", [USER], {}) == "2"


def test_a_conversation_that_no_child_process_could_hold_is_refused(
    rendering: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrt.chat.renderer.MAX_BYTES", 1000)
    with pytest.raises(RequestError, match="there may be 1000"):
        rendering.render("x", [{"role": "user", "content": "x" * 1000}], {})


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
