"""What programs that are written for OpenAI's Responses API send: tools of all kinds, and stored responses."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.test_responses import FUNCTIONS, check, plain
from tests.support.http_server import Served, serving
from tests.support.scripted_llm import Scripted, scripted

HELLO: dict[str, Any] = {"model": "tested", "input": "Hello", "max_output_tokens": 60}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes files."}
PROMPTS: list[list[int]] = []
LARK = 'start: "+" /[a-z]{2}/'
WITH_GRAMMAR = PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
WITH_REGEX = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}}


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with (
        scripted() as model,
        serving(model.llm, chat_template=None, tool_parser="hermes", reasoning_parser="think") as served,
    ):
        submit = served.service.llm.submit

        def noting(prepared: Any, *arguments: Any, **named: Any) -> Any:
            PROMPTS.append(prepared[0].tokens)
            return submit(prepared, *arguments, **named)

        served.service.llm.submit = noting  # type: ignore[method-assign]
        yield served, model


def call_of(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': text}})}\n</tool_call>"


def seen_by(model: Scripted) -> str:
    assert model.llm.tokenizer is not None
    return model.llm.tokenizer.decode(PROMPTS[-1], False)


@pytest.mark.parametrize("text", ['+ a\n- "b" é', ""])
def test_a_custom_tool_takes_free_text(text: str, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("So." + call_of(text))
    client = served.client()
    whole = client.responses.create(**HELLO | {"max_output_tokens": 400}, tools=[PATCH, *FUNCTIONS])
    _, call = whole.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", text)  # type: ignore[union-attr]
    with client.responses.stream(**HELLO | {"max_output_tokens": 400}, tools=[PATCH, *FUNCTIONS]) as stream:
        events = list(map(check, stream))
        final = stream.get_final_response()
    assert plain(final) == plain(whole)
    names = [event.type for event in events if "custom_tool_call" in event.type]
    assert names == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}  # type: ignore[union-attr]
    model.say("Fine.")
    history: Any = [{"role": "user", "content": "Hello"}, *[item.to_dict() for item in whole.output], output]
    client.responses.create(**HELLO | {"input": history})
    assert "'arguments': {'input': " in seen_by(model) and "tool: ok" in seen_by(model)


def test_a_grammar_of_a_custom_tool_holds_where_it_is_forced(served: Served) -> None:
    """A real model writes text of the grammar, with reasoning's tags unknown."""
    for choice in ({"type": "custom", "name": "patch"}, {"type": "function", "name": "patch"}):
        for stream in (False, True):
            got = served.client().responses.create(**HELLO, tools=[WITH_GRAMMAR], tool_choice=choice, stream=stream)  # type: ignore[call-overload]
            response = list(got)[-1].response if stream else got
            (call,) = response.output
            assert call.type == "custom_tool_call" and len(call.input) == 3 and call.input[0] == "+"


def test_a_regular_expression_of_a_custom_tool_holds(served: Served) -> None:
    for choice in ("required", {"type": "custom", "name": "patch"}):
        got = served.client().responses.create(
            **HELLO,
            tools=[WITH_REGEX],
            tool_choice=choice,
            parallel_tool_calls=False,  # type: ignore[arg-type]
        )
        (call,) = got.output
        assert call.type == "custom_tool_call" and len(call.input) == 3 and set(call.input) <= {"a", "b"}


def test_a_grammar_that_does_not_hold_is_said(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Hi.")
    answer = served.post("/v1/responses", HELLO | {"tools": [WITH_GRAMMAR]})
    assert answer.status_code == 200 and "grammar of a custom tool" in answer.headers["warning"]
    assert LARK.replace('"', '\\"').split()[1] in seen_by(model)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "grammar", "syntax": "lark", "definition": "start: nothing"},
        {"type": "grammar", "syntax": "lark", "definition": 'start: "a"' * 100_000},
        {"type": "grammar", "syntax": "peg", "definition": "x"},
        {"type": "grammar", "syntax": "lark", "definition": ""},
        {"type": "image"},
    ],
)
@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "patch"}])
def test_a_wrong_grammar_is_refused(form: Any, choice: Any, served: Served) -> None:
    """By the compiler of guided decoding, whether or not it would hold."""
    body = HELLO | {"tools": [PATCH | {"format": form}], "tool_choice": choice}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(("tools", "text")), answer.text


def test_grammars_of_custom_tools_are_few(served: Served) -> None:
    tools = [WITH_GRAMMAR | {"name": f"patch{i}"} for i in range(9)]
    answer = served.post("/v1/responses", HELLO | {"tools": tools})
    assert answer.status_code == 400 and "more than 8 grammars" in answer.json()["error"]["message"]


def test_tools_that_a_local_server_cannot_run_are_left_out(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Hi.")
    tools = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "mcp", "server_url": "http://x\r\nY: z"}]
    items = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call_output", "id": "x", "output": "secret"},
        {"role": "user", "content": "Hello"},
    ]
    for stream in (False, True):
        body = HELLO | {"tools": [*tools, *FUNCTIONS], "input": items, "stream": stream}
        answer = served.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        warnings = answer.headers["warning"]
        assert all(name in warnings for name in ("web_search", "local_shell", "mcp", "local_shell_call_output"))
        assert "server_url" not in warnings and "secret" not in seen_by(model) and "get_weather" in seen_by(model)
    assert "warning" not in served.post("/v1/responses", HELLO | {"tools": FUNCTIONS}).headers


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ({"mode": "auto", "tools": [{"type": "function", "name": "now"}]}, {"now"}),
        ({"mode": "auto", "tools": [{"type": "function", "name": "now"}, {"type": "web_search"}]}, {"now"}),
    ],
)
def test_allowed_tools(choice: Any, seen: set[str], talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Hi.")
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    nested = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in FUNCTIONS]
    inner = choice | {"tools": [{"type": "function", "function": {"name": "now"}}]}
    for path, body in (
        ("/v1/responses", HELLO | {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", **choice}}),
        (
            "/v1/chat/completions",
            chat | {"tools": nested, "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}},
        ),
    ):
        answer = served.post(path, body)
        assert answer.status_code == 200, answer.text
        assert '"now"' in seen_by(model) and "get_weather" not in seen_by(model)


@pytest.mark.parametrize(
    "choice",
    [
        {"mode": "auto"}, {"mode": "never", "tools": []},
        {"mode": "auto", "tools": [{"type": "function", "name": "x"}]},
        {"mode": "required", "tools": [{"type": "web_search"}]}, {"mode": [], "tools": [5]},
    ],
)  # fmt: skip
def test_wrong_allowed_tools_are_refused(choice: Any, talker: tuple[Served, Scripted]) -> None:
    body = HELLO | {"tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", **choice}}
    answer = talker[0].post("/v1/responses", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice", answer.text


def test_an_input_that_is_too_long_is_truncated_on_demand(served: Served) -> None:
    long = HELLO | {"input": "Hello " * 2000, "max_output_tokens": 16}
    assert served.post("/v1/responses", long).json()["error"]["code"] == "context_length_exceeded"
    got = served.post("/v1/responses", long | {"truncation": "auto"}).json()
    assert got["truncation"] == "auto" and got["usage"]["input_tokens"] == 255


def test_a_response_continues_another_one(talker: tuple[Served, Scripted]) -> None:
    """Streamed or not, by the id alone; instructions do not carry over."""
    served, model = talker
    client = served.client()
    model.say("One.")
    first = client.responses.create(**HELLO, instructions="Be brief.", store=True)
    model.say("Two.")
    asked: Any = HELLO | {"input": [{"role": "user", "content": "Next"}], "previous_response_id": first.id}
    *_, last = client.responses.create(**asked, stream=True)
    second = last.response  # type: ignore[union-attr]
    assert second.previous_response_id == first.id
    model.say("Three.")
    third = client.responses.create(**HELLO | {"input": "More"}, previous_response_id=second.id)
    assert seen_by(model) == "user: Hello\nassistant: One.\nuser: Next\nassistant: Two.\nuser: More\nassistant: "
    for response in (first, second, third):
        assert plain(client.responses.retrieve(response.id)) == plain(response)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as info:
        client.responses.create(**HELLO, previous_response_id=second.id)
    assert info.value.code == "previous_response_not_found"
    kept_out = client.responses.create(**HELLO, store=False)
    assert kept_out.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept_out.id)


def test_an_item_is_named_by_its_id(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("One.")
    first = served.client().responses.create(**HELLO)
    items: Any = [{"role": "user", "content": "Hello"}, {"type": "item_reference", "id": first.output[0].id}]
    got = served.client().responses.create(**HELLO | {"input": [*items, {"role": "user", "content": "Next"}]})
    assert seen_by(model) == "user: Hello\nassistant: One.\nuser: Next\nassistant: "
    served.client().responses.create(**HELLO | {"input": "More"}, previous_response_id=got.id)
    assert "assistant: One.\nuser: Next\nassistant: One.\nuser: More" in seen_by(model)


def test_a_running_response_is_seen_and_cancelled(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("a" * 7000)
    client = served.client()
    with served.llm.engine.turns:  # it cannot end before
        events = client.responses.create(
            model="tested", input="Hello", stream=True, extra_body={"request_id": "running"}
        )
        first = next(iter(events))
        assert client.responses.retrieve("resp_running").status == "in_progress"
        assert client.responses.cancel("resp_running").status == "cancelled"
    *_, last = events
    assert first.type == "response.created" and last.response.status == "cancelled"  # type: ignore[union-attr]
    assert client.responses.retrieve("resp_running").status == "cancelled"
    assert client.responses.cancel("resp_running").status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_nothing")


def ended(client: openai.OpenAI, name: str) -> Any:
    while (found := client.responses.retrieve(name)).status == "in_progress":
        time.sleep(0.01)
    return found


def test_a_response_in_the_background(talker: tuple[Served, Scripted]) -> None:
    """It is answered at once, runs though nobody waits, and is cancelled like others."""
    served, model = talker
    client = served.client()
    model.say("One.")
    with served.llm.engine.turns:  # it cannot end before
        first = client.responses.create(**HELLO, background=True)
        assert (first.status, first.background, first.output) == ("queued", True, [])
        assert client.responses.retrieve(first.id).status == "in_progress"
    found = ended(client, first.id)
    assert (found.status, found.background, found.output_text) == ("completed", True, "One.")
    model.say("a" * 7000)
    with served.llm.engine.turns:
        second = client.responses.create(**HELLO, background=True)
        assert client.responses.cancel(second.id).status == "cancelled"
    assert ended(client, second.id).status == "cancelled"
    assert not served.service.unwatched
    for wrong in ({"store": False}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as info:
            client.responses.create(**HELLO | wrong, background=True)
        assert info.value.param == "background"


def test_a_response_in_the_background_that_fails(broken_streams: None, served: Served) -> None:
    failed = ended(served.client(), served.client().responses.create(**HELLO, background=True).id)
    assert failed.status == "failed" and failed.error.message


def test_the_items_of_an_input_come_in_pages(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    client = served.client()
    model.say("One.")
    texts = ["a", "b", "c"]
    first = client.responses.create(**HELLO | {"input": [{"role": "user", "content": text} for text in texts]})
    page = client.responses.input_items.list(first.id, limit=2)
    assert [item.content for item in page.data] == ["c", "b"] and page.has_more  # type: ignore[union-attr]
    assert [item.content for item in page] == ["c", "b", "a"]  # type: ignore[union-attr]
    assert [item.content for item in client.responses.input_items.list(first.id, order="asc")] == texts  # type: ignore[union-attr]
    second = client.responses.create(**HELLO, previous_response_id=first.id)
    assert [item.content for item in client.responses.input_items.list(second.id)] == ["Hello"]  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_nothing")
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "none"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(first.id, **wrong)  # type: ignore[arg-type]


def test_responses_and_requests_belong_to_their_key(talker: tuple[Served, Scripted]) -> None:
    """Two clients may use one id; none sees, continues, cancels or aborts what another one has."""
    _, model = talker
    model.say("One.")
    with serving(model.llm, chat_template=None, api_keys=("mine", "yours")) as locked:
        mine, yours = (locked.client(api_key=key) for key in ("mine", "yours"))
        asked: Any = HELLO | {"extra_body": {"request_id": "same"}}
        first = mine.responses.create(**asked)
        item: Any = [{"type": "item_reference", "id": first.output[0].id}]
        for ask in (
            lambda: yours.responses.retrieve(first.id),
            lambda: yours.responses.cancel(first.id),
            lambda: yours.responses.delete(first.id),
            lambda: yours.responses.input_items.list(first.id),
            lambda: yours.responses.create(**HELLO, previous_response_id=first.id),
            lambda: yours.responses.create(**HELLO | {"input": item}),
        ):
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                ask()
        model.say("a" * 7000)
        with locked.llm.engine.turns:
            both = [each.responses.create(**asked, stream=True) for each in (mine, yours)]
            heads = [next(iter(events)) for events in both]
            assert [head.response.id for head in heads] == ["resp_same"] * 2  # type: ignore[union-attr]
            own = {"Authorization": "Bearer mine"}
            again = locked.post("/v1/responses", HELLO | {"request_id": "same"}, headers=own)
            assert again.json()["error"]["param"] == "request_id" and "key" not in again.json()["error"]["message"]
            sent = {"Authorization": "Bearer yours"}
            for name in ("key0/resp_same", "key0/same"):
                assert locked.post("/abort", {"request_id": name}, headers=sent).json() == {"aborted": False}
            assert locked.post("/abort", {"request_id": "same"}, headers=sent).json() == {"aborted": True}
            running = locked.service.llm.stream_of("key0/resp_same")
            assert running is not None and running.running == 1
            mine.responses.cancel("resp_same")
        assert [list(events)[-1].response.status for events in both] == ["cancelled"] * 2  # type: ignore[union-attr]


SPACE: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [*FUNCTIONS[:1], PATCH]}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace(stream: bool, talker: tuple[Served, Scripted]) -> None:
    """Such as those of an MCP server: calls name it, and histories with it are what the model has written."""
    served, model = talker
    model.say(call_of("x").replace("patch", "crm__patch"))
    client, body = served.client(), HELLO | {"max_output_tokens": 400}
    got = client.responses.create(**body, tools=[SPACE, PATCH], stream=stream)  # type: ignore[call-overload]
    whole = list(map(check, got))[-1].response if stream else got
    (call,) = whole.output
    assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "crm", "patch", "x")
    assert "Changes files.\\nCustomers." in seen_by(model) and whole.tools[0].name == "crm"
    model.say("Fine.")
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
    client.responses.create(**body | {"input": [call.to_dict(), output]}, tools=[SPACE])
    assert "'name': 'crm__patch'" in seen_by(model)
    function = {"type": "function_call", "call_id": "c", "name": "now", "namespace": "crm__", "arguments": "{}"}
    client.responses.create(**body | {"input": [function, output | {"type": "function_call_output", "call_id": "c"}]})
    assert "'name': 'crm__now'" in seen_by(model)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice names web_search"),
        ({"tools": [{"type": "crystal_ball"}]}, "tools.0: type is 'crystal_ball'; it must be function, custom"),
        ({"input": [{"type": "configuration_update"}]}, "input.0: type is 'configuration_update'; it must be message"),
        ({"tools": [SPACE | {"tools": [{"type": "web_search"}]}]}, "tools.0.tools.0: type is 'web_search'"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], named: str, served: Served) -> None:
    answer = served.post("/v1/responses", HELLO | body)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text


def test_an_item_is_named_without_a_type(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("An earlier answer.")
    (item,) = served.client().responses.create(**HELLO).output
    for named in ({"id": item.id}, {"id": item.id, "type": None}):
        assert served.post("/v1/responses", HELLO | {"input": [named]}).status_code == 200
        assert "An earlier answer." in seen_by(model)


def test_a_summary_stands_in_for_reasoning_without_content(talker: tuple[Served, Scripted]) -> None:
    _, model = talker
    summary = {"summary": [{"type": "summary_text", "text": "Shortly."}]}
    content = {"content": [{"type": "reasoning_text", "text": "At great length."}]}
    template = "{% for message in messages %}{{ message.reasoning_content }}|{% endfor %}"
    with serving(model.llm, chat_template=template) as own:

        def tokens(item: dict[str, Any]) -> int:
            history = [{"role": "user", "content": "Hello"}, {"type": "reasoning", "id": "r", **item}]
            return int(own.post("/v1/responses", HELLO | {"input": history}).json()["usage"]["input_tokens"])

        assert tokens(content | summary) == tokens(content) > tokens(summary) > tokens({"summary": []})


def test_a_kept_response_is_no_stream(served: Served) -> None:
    response = served.client().responses.create(**HELLO)
    with pytest.raises(openai.BadRequestError, match="leave out stream"):
        served.client().responses.retrieve(response.id, stream=True)
