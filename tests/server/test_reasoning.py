"""Reasoning over HTTP: budgets, efforts and counts, on every endpoint, streamed and not. The model says what a script
says, unless a grammar forbids it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.http_server import Served, serving
from tests.support.lazily import lazily
from tests.support.levels import sweep
from tests.support.scripted_llm import TEMPLATE, Scripted, scripted

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazily("anthropic")

ASK: list[Any] = [{"role": "user", "content": "Why?"}]
OPEN = {"chat_template_kwargs": {"enable_thinking": True}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 1}}}
Talker = tuple[Served, Scripted]


@pytest.fixture(scope="module")
def talker() -> Iterator[Talker]:
    options: Any = {"chat_template": None, "tool_parser": "hermes", "reasoning_parser": "think"}
    with scripted() as model, serving(model.llm, **options) as served:
        yield served, model


def answered(served: Served, stream: bool, **body: Any) -> tuple[str, str, int, str]:
    """Content, reasoning, its tokens and the finish reason."""
    create: Any = served.client().chat.completions.create
    asked = {"model": "tested", "messages": ASK, "max_tokens": 60, "extra_body": body}
    if not stream:
        got = create(**asked)
        (choice,), usage = got.choices, got.usage
        parts = [choice.message]
    else:
        chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
        usage, choices = chunks[-1].usage, [choice for chunk in chunks for choice in chunk.choices]
        parts, choice = [choice.delta for choice in choices], choices[-1]
    content = "".join(part.content or "" for part in parts)
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    return content, reasoning, usage.completion_tokens_details.reasoning_tokens, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_ends_the_reasoning(stream: bool, talker: Talker) -> None:
    """Then the script goes on after the tag that the grammar demanded: each sample's token i is the script's."""
    served, model = talker
    model.say("<think>0123456789</think>So.")
    assert answered(served, stream) == ("So.", "0123456789", 12, "stop")
    assert answered(served, stream, thinking_token_budget=20) == ("So.", "0123456789", 12, "stop")
    assert answered(served, stream, thinking_token_budget=4) == ("56789</think>So.", "0123", 6, "stop")
    assert answered(served, stream, thinking_token_budget=0)[1:] == ("", 2, "stop")
    model.say("01é</think>So.")
    _, *others = answered(served, stream, thinking_token_budget=3, **OPEN)
    assert others == ["01", 4, "stop"], "the budget ends within a character"
    model.say("0123456789</think>So.")
    assert answered(served, stream, thinking_token_budget=4, **OPEN) == ("56789</think>So.", "0123", 5, "stop")
    model.say("No thought.")
    assert answered(served, stream, thinking_token_budget=4) == ("No thought.", "", 0, "stop")


def test_a_budget_beside_a_form_and_beside_calls(talker: Talker) -> None:
    served, model = talker
    model.say("0123456789</think>So.")
    body = {"thinking_token_budget": 3, **OPEN}
    content, reasoning, tokens, _ = answered(served, True, guided_choice=["yes"], **body)
    assert (content, reasoning, tokens) == ("yes", "012", 4)
    body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 400, "messages": ASK}
    body |= {"parallel_tool_calls": False}
    choice = served.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "012" and choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f"]


def test_calls_or_a_form(talker: Talker) -> None:
    """With tools, an answer of a fixed form may be calls instead."""
    served, model = talker
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for said, wanted in (("Hm</think>" + call, ("", "Hm", "tool_calls")), ("Hm</think>1", ("1", "Hm", "stop"))):
        model.say(said)
        for stream in (False, True):
            got = answered(served, stream, tools=[TOOL], response_format=FORM, **OPEN)
            assert (got[0], got[1], got[3]) == wanted


def test_a_form_that_no_text_has_is_refused_before_the_reasoning(talker: Talker) -> None:
    served, _ = talker
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    body = {"messages": ASK, "response_format": form, "stream": True, **OPEN}
    for more in ({}, {"tools": [TOOL]}):
        answer = served.post("/v1/chat/completions", body | more)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format", answer.text


@pytest.mark.parametrize("closed", sweep(["<think>\n\n</think>\n\n", "</think>", "<think></think>\n"], 3))
def test_a_prompt_that_has_closed_the_reasoning(closed: str, talker: Talker) -> None:
    """As templates write it that are told not to reason. The answer is content at once; a fixed form begins at once. A
    model that reasons nevertheless keeps to its budget."""
    _, model = talker
    switch = "{% if enable_thinking | default(true) %}<think>{% else %}" + closed + "{% endif %}"
    ask: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    call = {"tools": [TOOL], "tool_choice": "required"}
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    strict = {"tools": [{"type": "function", "function": TOOL["function"] | {"strict": True}}]}
    with serving(
        model.llm,
        chat_template=TEMPLATE.replace("{% if enable_thinking %}<think>\n{% endif %}", switch),
        reasoning_parser="think",
        tool_parser="hermes",
    ) as served:
        model.say("So.</think>")
        for more in ({}, {"thinking_token_budget": 0}, {"thinking_token_budget": 3}):
            for stream in (False, True):
                assert answered(served, stream, **ask, **more) == ("So.</think>", "", 0, "stop")
        assert answered(served, True, reasoning_effort="none") == ("So.</think>", "", 0, "stop")
        assert answered(served, True)[1] == "So."
        for more in ({}, {"thinking_token_budget": 3}):
            assert answered(served, True, guided_choice=["yes"], **ask, **more) == ("yes", "", 0, "stop")
            assert answered(served, True, response_format=FORM, **ask, **more) == ("1", "", 0, "stop")
            for forced in (call, named):
                assert answered(served, True, **forced, **ask, **more)[1:] == ("", 0, "tool_calls")
        model.say("<think>0123456789</think>So.")
        assert answered(served, True, **ask) == ("So.", "0123456789", 12, "stop")
        for more in ({}, strict):
            got = answered(served, True, thinking_token_budget=3, **ask, **more)
            assert got == ("456789</think>So.", "012", 5, "stop")


def test_an_answer_that_continues_reasoning(talker: Talker) -> None:
    """The final message is its beginning."""
    served, model = talker
    model.say("23</think>So.")
    for begun, wanted in (("<think>01", ("So.", "23", 3)), ("<think>01</think>", ("23</think>So.", "", 0))):
        messages = [*ASK, {"role": "assistant", "content": begun}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        for more in ({}, {"thinking_token_budget": 9}):
            answer = served.post("/v1/chat/completions", body | more).json()
            message = answer["choices"][0]["message"]
            tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert (message["content"], message.get("reasoning_content", ""), tokens) == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_if_it_is_not_wanted(stream: bool, talker: Talker) -> None:
    served, model = talker
    model.say("<think>0123456789</think>So.")
    assert answered(served, stream, include_reasoning=False) == ("So.", "", 12, "stop")


def test_a_budget_of_messages(talker: Talker) -> None:
    """Thinking that is enabled is opened by the prompt, where the template has a switch for it."""
    served, model = talker
    model.say("0123456789</think>So.")
    client = anthropic.Anthropic(api_key="none", base_url=served.url, max_retries=0)
    asked: Any = {"model": "tested", "messages": ASK, "max_tokens": 60}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 4}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for got in (client.messages.create(**asked), streamed):
        thought, text = got.content
        assert (thought.thinking, text.text) == ("0123", "56789</think>So.")  # type: ignore[union-attr]
    body = asked | {"chat_template_kwargs": {"enable_thinking": False}}
    assert served.post("/v1/messages", body).json()["content"][0]["text"].startswith("0123")


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_responses(stream: bool, talker: Talker) -> None:
    served, model = talker
    model.say("0123456789</think>So.")
    asked: Any = {"model": "tested", "input": "Why?", "extra_body": {"thinking_token_budget": 4, **OPEN}}
    got = served.client().responses.create(**asked, stream=stream)
    if stream:
        got = next(event for event in got if event.type == "response.completed").response
    thought, message = got.output
    assert (thought.content[0].text, message.content[0].text) == ("0123", "56789</think>So.")
    assert got.usage.output_tokens_details.reasoning_tokens == 5


def test_efforts_reach_the_template(talker: Talker) -> None:
    """On each endpoint under its own name. The prompt's length tells what the template has seen."""
    _, model = talker
    template = "{{ 'x' * {'none': 1, 'low': 2, 'max': 3}[reasoning_effort] }}{{ '' if enable_thinking is defined }}"
    template += "{{ 'yyyyy' if enable_thinking is false }}"
    with serving(model.llm, chat_template=template) as served:
        for effort, length in (("none", 6), ("low", 2), ("max", 3)):
            bodies: dict[str, Any] = {
                "/v1/chat/completions": {"messages": ASK, "reasoning_effort": effort},
                "/v1/responses": {"input": "Why?", "reasoning": {"effort": effort}},
                "/v1/messages": {"messages": ASK, "output_config": {"effort": effort}},
            }
            for path, body in bodies.items():
                usage = served.post(path, body | {"max_tokens": 3}).json()["usage"]
                assert usage.get("prompt_tokens", usage.get("input_tokens")) == length, (path, effort)
