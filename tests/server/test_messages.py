"""/v1/messages with Anthropic's client, over a model that says what a script says: streamed equals whole."""

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.chat_samples import TOOLS
from tests.support.http_server import WAIT, Served, serving
from tests.support.lazily import lazily
from tests.support.scripted_llm import Scripted, scripted

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazily("anthropic")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
SAID = f"<think>\nHm é.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
FUNCTIONS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
    }
    for tool in TOOLS
]
SCRIPTS = {
    "text": "Grüezi!",
    "thought": "<think>\nHm é.\n</think>\n\nSo.",
    "calls": SAID,
    "a broken call": '<tool_call>{"name": "now", "arguments": {"a": [1, tr',
    "nothing": "",
}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with (
        scripted() as model,
        serving(model.llm, chat_template=None, tool_parser="hermes", reasoning_parser="think") as served,
    ):
        yield served, model


def client(served: Served, **options: Any) -> "anthropic.Anthropic":
    return made(served.url, **options)


@cache  # a client reads the certificates of the system, which takes longer than a request
def made(url: str, **options: Any) -> "anthropic.Anthropic":
    options = {"api_key": "none", "max_retries": 0, "timeout": WAIT} | options
    return anthropic.Anthropic(base_url=url, **options)


def plain(message: Any) -> dict[str, Any]:
    """A message without what differs from one request to the next."""
    found: dict[str, Any] = json.loads(message.to_json())
    for thing in (found, *found["content"]):
        thing.pop("id", None)
    found.pop("stop_details", None)  # the client's own, from a stream
    usage = found["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stream_adds_up_to_the_whole(script: str, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    tokens = model.say(SCRIPTS[script])
    asked: Any = {"model": "tested", "messages": HELLO, "tools": FUNCTIONS, "max_tokens": 400}
    whole = client(served).messages.create(**asked)
    with client(served).messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    assert whole.usage.output_tokens == len(tokens) + 1 and whole.type == "message" and whole.role == "assistant"
    raw = list(client(served).messages.create(**asked, stream=True))
    for event in (*raw, whole):  # no field is missing that the client declares as required
        type(event).model_validate(event.to_dict())  # type: ignore[attr-defined]
    kinds = [event.type for event in raw]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [event for event in raw[1:-2]]
    for index in range(len(whole.content)):
        mine = [event for event in blocks if event.index == index]  # type: ignore[union-attr]
        assert mine == blocks[: len(mine)], "a block ends before the next one begins"
        blocks = blocks[len(mine) :]
        inner = ["content_block_delta"] * (len(mine) - 2)
        assert [event.type for event in mine] == ["content_block_start", *inner, "content_block_stop"]
    assert blocks == []


def test_blocks_of_an_answer(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(SAID)
    got = client(served).messages.create(model="tested", messages=HELLO, tools=FUNCTIONS, max_tokens=400)
    thought, text, *calls = got.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm é.")  # type: ignore[union-attr]
    assert (text.type, text.text) == ("text", "Let me see.")  # type: ignore[union-attr]
    assert [(c.name, c.input) for c in calls] == [("get_weather", {"city": "Zürich", "days": 3})] * 2  # type: ignore[union-attr]
    assert got.stop_reason == "tool_use"


def test_a_conversation_continues_with_its_own_blocks(talker: tuple[Served, Scripted]) -> None:
    """The template sees the system prompt, the assistant's message, and results of tools as messages."""
    served, model = talker
    model.say(SAID)
    first = client(served).messages.create(model="tested", messages=HELLO, tools=FUNCTIONS, max_tokens=400)
    call: Any = first.content[2]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}]}
    more: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    model.say("Fine.")
    got = client(served).messages.create(
        model="tested", system=[{"type": "text", "text": "Be brief."}], messages=more, max_tokens=9
    )
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.input}}  # type: ignore[union-attr]
        for c in first.content[2:]
    ]
    text = f"system: Be brief.\nuser: Hello\nassistant: Let me see.{calls}\ntool: Rain\nuser: And?\nassistant: "
    assert model.llm.tokenizer is not None
    expected = len(model.llm.tokenizer.encode_bare(text))
    assert got.usage.input_tokens + (got.usage.cache_read_input_tokens or 0) == expected
    counted = client(served).messages.count_tokens(model="tested", system="Be brief.", messages=more)
    assert counted.input_tokens == expected


def test_an_answer_continues_the_last_message(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(" there")
    asked: Any = [*HELLO, {"role": "assistant", "content": "Hello"}]
    counted = client(served).messages.count_tokens(model="tested", messages=asked)
    assert model.llm.tokenizer is not None
    assert counted.input_tokens == len(model.llm.tokenizer.encode_bare("user: Hello\nassistant: Hello"))
    got = client(served).messages.create(model="tested", messages=asked, max_tokens=20)
    assert got.content[0].text == " there"  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends(stream: bool, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Grüezi mitenand, ade")

    def ask(**options: Any) -> tuple[Any, ...]:
        asked: Any = {"model": "tested", "messages": HELLO, "max_tokens": 40} | options
        if stream:
            with client(served).messages.stream(**asked) as events:
                got = events.get_final_message()
        else:
            got = client(served).messages.create(**asked)
        return got.stop_reason, got.stop_sequence, got.content[0].text  # type: ignore[union-attr]

    assert ask() == ("end_turn", None, "Grüezi mitenand, ade")
    assert ask(max_tokens=4) == ("max_tokens", None, "Grü")
    assert ask(stop_sequences=["nobody", "tena"]) == ("stop_sequence", "tena", "Grüezi mi")
    kept = ask(stop_sequences=["nobody", "tena"], extra_body={"include_stop_str_in_output": True})
    assert kept == ("stop_sequence", "tena", "Grüezi mitena")
    assert ask(stop_sequences=["nobody"]) == ("end_turn", None, "Grüezi mitenand, ade")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": []}, "messages: "),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"n": 2}, "one sample"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.source: type is None",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: "),
        ({"tool_choice": {"type": "tool"}, "tools": FUNCTIONS}, "needs the name of a tool"),
        ({"tool_choice": {"type": "tool", "name": "none"}, "tools": FUNCTIONS}, "none of tools"),
        ({"output_config": {"effort": "much"}}, "reasoning_effort is 'much'"),
        ({"logprobs": True}, "logprobs is not supported here"),
        ({"top_logprobs": 3}, "top_logprobs is not supported here"),
    ],
)
def test_what_cannot_be_done_is_said_in_anthropics_form(
    body: dict[str, Any], text: str, talker: tuple[Served, Scripted]
) -> None:
    with pytest.raises(anthropic.BadRequestError) as info:
        client(talker[0]).messages.create(model="tested", messages=HELLO, max_tokens=5, extra_body=body)
    found: Any = info.value.body
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert text in found["error"]["message"]


def test_models_and_keys(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Hello")
    with pytest.raises(anthropic.NotFoundError) as info:
        client(served).messages.create(model="other", messages=HELLO, max_tokens=5)
    assert info.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with serving(model.llm, chat_template=None, api_keys=("secret",)) as locked:
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            got = client(locked, **options).messages.create(model="tested", messages=HELLO, max_tokens=5)
            assert got.content[0].text == "Hello"  # type: ignore[union-attr]
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client(locked, api_key="guessed").messages.create(model="tested", messages=HELLO, max_tokens=5)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.usefixtures("broken_streams")
def test_a_failure_within_a_stream_is_an_error(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Hello")
    with pytest.raises(anthropic.APIStatusError, match="the device is gone"):
        list(client(served).messages.create(model="tested", messages=HELLO, max_tokens=5, stream=True))


CITY: Any = {
    "type": "object", "properties": {"city": {"enum": ["Bern", "Genf"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


def test_forced_calls_and_formats_of_a_real_model(served: Served) -> None:
    asked: Any = {"model": "tested", "messages": HELLO, "max_tokens": 100}
    tools: Any = [{"name": "visit", "input_schema": CITY}]
    several: Any = {"type": "any", "disable_parallel_tool_use": True}
    whole = client(served).messages.create(**asked, tools=tools, tool_choice=several)
    one: Any = {"type": "tool", "name": "visit"}
    with client(served).messages.stream(**asked, tools=tools, tool_choice=one) as stream:
        final = stream.get_final_message()
    for got in (whole, final):
        (call,) = got.content
        assert call.type == "tool_use" and call.input["city"] in ("Bern", "Genf") and got.stop_reason == "tool_use"
    form = {"output_config": {"format": {"type": "json_schema", "schema": CITY}}}
    text: Any = client(served).messages.create(**asked, extra_body=form).content[0]
    assert json.loads(text.text)["city"] in ("Bern", "Genf")


def test_thinking_is_turned_off(talker: tuple[Served, Scripted]) -> None:
    thinker, model = talker
    model.say("<think>\nHm.\n</think>\n\nSo.")
    got = client(thinker).messages.create(
        model="tested", messages=HELLO, max_tokens=50, thinking={"type": "disabled"}, extra_body={"seed": 1}
    )
    assert got.content[-1].text == "So."  # type: ignore[union-attr]
