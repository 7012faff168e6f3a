"""Custom tools in chat completions: calls, streams, history and grammars, compared with LLM.chat."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.server.openai.custom_calls import input_of
from tests.support.http_server import CHAT_TEMPLATE, Served, serving
from tests.support.scripted_llm import Scripted, scripted

USER: dict[str, Any] = {"role": "user", "content": "Hello"}
BODY: dict[str, Any] = {"model": "tested", "messages": [USER], "max_tokens": 400}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
NOW: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
CHOICE: dict[str, Any] = {"type": "custom", "custom": {"name": "patch"}}
LARK = 'start: "+" /[a-z]{2}/'


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": PATCH["custom"] | {"format": form}}


def call_of(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with (
        scripted() as model,
        serving(model.llm, chat_template=None, tool_parser="hermes", reasoning_parser="think") as served,
    ):
        yield served, model


def streamed(served: Served, **body: Any) -> tuple[list[dict[str, Any]], list[Any]]:
    """The calls of sample 0 as a client adds them up, and all finish reasons."""
    calls, reasons = list[dict[str, Any]](), list[Any]()
    for chunk in served.client().chat.completions.create(**BODY | body, stream=True):
        for choice in chunk.choices:
            reasons += [choice.finish_reason] * (choice.finish_reason is not None)
            for part in choice.delta.tool_calls or () if choice.index == 0 else ():
                given = part.to_dict()
                if given.pop("index") == len(calls):
                    calls.append(given)
                    continue
                for kind in given.keys() & {"custom", "function"}:
                    for name, value in given[kind].items():
                        calls[part.index][kind][name] += value
    return calls, reasons


@pytest.mark.parametrize("text", ['+ a\n- "b" é', ""])
def test_a_custom_tool_takes_free_text(text: str, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("So." + call_of("patch", {"input": text}) + call_of("now", {}))
    (offline,) = model.llm.chat([USER], SamplingParams(max_tokens=400), tools=[PATCH, NOW], tool_parser="hermes")
    whole = served.client().chat.completions.create(**BODY, tools=[PATCH, NOW], n=2)
    for choice in whole.choices:
        first, second = choice.message.tool_calls or ()
        assert (first.type, first.custom.name, first.custom.input) == ("custom", "patch", text)  # type: ignore[union-attr]
        assert first.custom.input == input_of(offline.tool_calls[0].arguments)  # type: ignore[union-attr]
        assert (second.type, second.function.name) == ("function", "now")  # type: ignore[union-attr]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", offline.content)
    calls, reasons = streamed(served, tools=[PATCH, NOW], n=2)
    assert [{k: v for k, v in call.items() if k != "id"} for call in calls] == [
        {"type": "custom", "custom": {"name": "patch", "input": text}},
        {"type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert reasons == ["tool_calls"] * 2


def test_a_call_that_is_cut_off_brings_what_there_is(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(call_of("patch", {"input": "+ a line and more"})[:-30])
    whole = served.client().chat.completions.create(**BODY | {"max_tokens": 50}, tools=[PATCH])
    (call,) = whole.choices[0].message.tool_calls or ()
    (same,), reasons = streamed(served, tools=[PATCH], max_tokens=50)
    assert call.custom.input == same["custom"]["input"] and reasons == [whole.choices[0].finish_reason]  # type: ignore[union-attr]


def test_calls_of_the_history_are_read(served: Served, talker: tuple[Served, Scripted]) -> None:
    """Custom calls are for the model what calls of functions are, here and in LLM.chat."""
    _, model = talker
    own = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "+ a"}}
    same = {"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "+ a"}'}}
    prompts = []
    for call in (own, same):
        messages = [
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
        (out,) = model.llm.chat(messages, SamplingParams(max_tokens=2), tools=[PATCH], tool_parser="hermes")
        prompts.append(out.output.prompt_token_ids)
        assert (
            talker[0].post("/v1/chat/completions", BODY | {"messages": messages, "tools": [PATCH]}).status_code == 200
        )
    assert prompts[0] == prompts[1]
    for wrong in ({"name": "patch"}, {"name": "patch", "input": 3}, "patch", {"input": "x"}):
        messages = [USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": wrong}]}]
        answer = served.post("/v1/chat/completions", BODY | {"messages": messages, "tools": [PATCH]})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages.1"), answer.text


@pytest.mark.parametrize("choice", [CHOICE, {"type": "function", "function": {"name": "patch"}}])
def test_a_forced_grammar_makes_the_answer_a_call(choice: Any, served: Served) -> None:
    body: dict[str, Any] = {"tools": [with_grammar("lark", LARK)], "tool_choice": choice, "temperature": 0}
    params, asked = SamplingParams(max_tokens=400, temperature=0), {"tools": body["tools"], "tool_choice": choice}
    (offline,) = served.llm.chat([USER], params, chat_template=CHAT_TEMPLATE, **asked)
    (expected,) = offline.tool_calls
    text = json.loads(expected.arguments)["input"]
    assert len(text) == 3 and text[0] == "+" and not offline.content and offline.finish_reason == "tool_calls"
    whole = served.client().chat.completions.create(**BODY, **body)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.custom.input == text and whole.choices[0].finish_reason == "tool_calls"  # type: ignore[union-attr]
    (same,), reasons = streamed(served, **body)
    assert same["custom"] == {"name": "patch", "input": text} and reasons == ["tool_calls"]
    cut = served.client().chat.completions.create(**BODY | {"max_tokens": 1}, **body)
    (call,) = cut.choices[0].message.tool_calls or ()
    assert text.startswith(call.custom.input) and cut.choices[0].finish_reason == "length"  # type: ignore[union-attr]


def test_an_empty_forced_text_is_a_call(served: Served) -> None:
    tools = [with_grammar("lark", 'start: "x"?')]
    more = {"logit_bias": {"0": 100, "2": 100}}
    whole = served.client().chat.completions.create(**BODY, tools=tools, tool_choice=CHOICE, **more)  # type: ignore[arg-type]
    (call,) = whole.choices[0].message.tool_calls or ()
    assert (call.custom.input, whole.choices[0].finish_reason) == ("", "tool_calls")  # type: ignore[union-attr]


def test_a_regular_expression_holds_and_a_grammar_that_does_not_is_said(
    served: Served, talker: tuple[Served, Scripted]
) -> None:
    tools: Any = [with_grammar("regex", "[ab]{3}")]
    whole = served.client().chat.completions.create(**BODY, tools=tools, tool_choice=CHOICE)  # type: ignore[arg-type]
    (call,) = whole.choices[0].message.tool_calls or ()
    assert len(call.custom.input) == 3 and set(call.custom.input) <= {"a", "b"}  # type: ignore[union-attr]
    other, model = talker
    model.say("Hi.")
    answer = other.post("/v1/chat/completions", BODY | {"tools": [with_grammar("lark", LARK)]})
    assert answer.status_code == 200 and "grammar of a custom tool" in answer.headers["warning"]
