"""What a request may bring is bounded before it costs anything, and answers do not contradict themselves."""

from typing import Any

import pytest

from hybridrt.base.errors import RequestError
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import CallArguments, CallBegin, ChatMessage, Content, Reasoning, ToolCall
from hybridrt.chat.schemas import named_arguments
from hybridrt.engine.api.chats import check_characters
from tests.support.http_server import Served

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [1] * 10_000}),
    ("/v1/messages", {"messages": [1] * 10_000, "max_tokens": 2}),
    ("/v1/responses", {"input": [1] * 10_000}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_a_list_ends_with_its_first_wrong_entry(
    path: str, body: dict[str, Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridrt.server.wire import errors

    seen = list[int]()
    as_field_error = errors._as_field_error

    def counted(error: Any) -> Any:
        seen.append(len(error.errors()))
        return as_field_error(error)

    monkeypatch.setattr(errors, "_as_field_error", counted)
    assert served.post(path, {"model": "tested", **body}).status_code == 400
    assert max(seen, default=0) < 100


def test_triggers_are_counted_before_a_grammar_is_made(served: Served) -> None:
    triggers = [f"<{i:03}" + "x" * 200 for i in range(64)]
    tags = [{"begin": trigger, "schema": {}, "end": ">"} for trigger in triggers]
    form = {"type": "structural_tag", "structures": tags, "triggers": triggers}
    body = {"model": "tested", "messages": [{"role": "user", "content": "a"}], "response_format": form}
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "64 triggers make a grammar of" in answer.json()["error"]["message"]


@pytest.mark.parametrize("parameters", [{"$ref": "#/x", "x": 5}, {"required": [{}], "properties": {"a": {}}}])
def test_odd_schemas_of_strict_tools(parameters: dict[str, Any]) -> None:
    import re

    from hybridrt.chat.schemas import Tool

    definition = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tool = Tool("f", parameters, definition, strict=True)
    assert set(named_arguments(tool, re.compile(r"\w+"))) <= {"a"}


@pytest.mark.parametrize(
    "fields", [{"metadata": {"k": "v" * 513}}, {"metadata": {"k" * 65: "v"}}, {"user": "u" * 5000}]
)
def test_what_a_response_repeats_is_bounded(fields: dict[str, Any], served: Served) -> None:
    answer = served.post("/v1/responses", {"model": "tested", "input": "a", "max_output_tokens": 1, **fields})
    assert answer.status_code == 400


def test_echo_and_a_cut_prompt_are_refused_together(served: Served) -> None:
    body = {"model": "tested", "prompt": "abc def", "echo": True, "truncate_prompt_tokens": 2}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("content", ["x" * 1001, [{"type": "text", "text": "x" * 501}] * 2])
def test_characters_of_parts_count(content: Any) -> None:
    with pytest.raises(RequestError, match="characters"):
        check_characters(read_conversation([{"role": "user", "content": content}]), 1000)


def test_an_answer_is_the_sum_of_its_events() -> None:
    message = ChatMessage().extend([Content("a"), Reasoning("b"), CallBegin(0, "i", "f"), CallArguments(0, "{")])
    assert (message.content, message.reasoning, message.tool_calls) == ("a", "b", [ToolCall("i", "f", "{")])
    message.extend([Content("c"), CallArguments(0, "}"), Reasoning("dd")])
    assert (message.content, message.reasoning, message.tool_calls) == ("ac", "bdd", [ToolCall("i", "f", "{}")])
    assert (message.reasoning_length, message.num_calls) == (3, 1)
