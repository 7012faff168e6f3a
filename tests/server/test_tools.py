"""Tools and reasoning over HTTP, with OpenAI's client: a model that says what a script says, and the built-in one."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hybridrt.chat.events import ChatMessage
from hybridrt.chat.registry import TOOL_PARSERS
from tests.support.chat_samples import DALLAS, SAMPLES, TOOLS, Sample
from tests.support.http_server import Served, serving
from tests.support.lazily import lazily
from tests.support.levels import sweep
from tests.support.scripted_llm import Scripted, scripted

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def speaker() -> Iterator[Scripted]:
    with scripted() as found:
        yield found


@pytest.fixture(scope="module")
def _server(speaker: Scripted) -> Iterator[Served]:
    with serving(speaker.llm, chat_template=None, reasoning_parser="think") as found:
        yield found


@pytest.fixture
def served(_server: Served) -> Iterator[Served]:
    yield _server
    _server.wait_until_idle()


def use(served: Served, parser: str) -> None:
    """The server's parser of tool calls from here on."""
    object.__setattr__(served.service.config, "tool_parser", parser)


def assembled(stream: Any) -> tuple[str, str, list[tuple[str, str]], str | None, list[Any]]:
    """Content, reasoning, calls, finish reason and deltas of a stream, put together as a client does."""
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    reason, deltas = None, []
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            deltas.append(delta)
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index not in calls:
                    assert call.id and call.type == "function" and call.function.name
                    calls[call.index] = [call.function.name, ""]
                else:
                    assert call.id is None and call.function.name is None
                calls[call.index][1] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, reasoning, [(name, text) for name, text in calls.values()], reason, deltas


@pytest.mark.parametrize("sample", SAMPLES[1::4], ids=lambda sample: f"{sample.parser} {sample.name}")
def test_streams_add_up_to_the_answer_that_is_no_stream(sample: Sample, served: Served, speaker: Scripted) -> None:
    use(served, sample.parser)
    tokens = speaker.say(sample.text)
    ask: Any = {"model": "tested", "messages": ASK, "tools": TOOLS}
    whole = served.client().chat.completions.create(**ask)
    message: Any = whole.choices[0].message
    assert (message.content or "") == sample.content
    assert getattr(message, "reasoning_content", "") == sample.reasoning
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert [name for name, _ in calls] == [name for name, _ in sample.calls]
    for (_, text), (_, wanted) in zip(calls, sample.calls, strict=True):
        assert wanted is None or json.loads(text) == wanted
    assert whole.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    assert whole.usage is not None and whole.usage.completion_tokens == len(tokens) + 1
    details = whole.usage.completion_tokens_details
    assert details is not None and bool(details.reasoning_tokens) == ("<think>" in sample.text)
    content, reasoning, streamed, reason, _ = assembled(served.client().chat.completions.create(stream=True, **ask))
    assert (content, reasoning, streamed, reason) == (
        message.content or "",
        getattr(message, "reasoning_content", ""),
        calls,
        whole.choices[0].finish_reason,
    )


def test_no_delta_holds_half_a_character_or_a_tag(served: Served, speaker: Scripted) -> None:
    use(served, "hermes")
    speaker.say("<think>\nHm ü 😀.\n</think>\n\nSo: é 😀\n" + CALL)
    stream = served.client().chat.completions.create(model="tested", messages=ASK, tools=TOOLS, stream=True)  # type: ignore[call-overload]
    content, reasoning, calls, reason, deltas = assembled(stream)
    assert (content, reasoning, reason) == ("So: é 😀", "Hm ü 😀.", "tool_calls")
    assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", {"city": "Zürich 😀", "days": 3})]
    for delta in deltas:
        text = delta.model_dump_json()
        assert "\N{REPLACEMENT CHARACTER}" not in text and "tool_call>" not in text and "think>" not in text


def test_history_with_calls_choices_and_effort(served: Served, speaker: Scripted) -> None:
    use(served, "hermes")
    speaker.say("It is warm." + CALL + CALL)
    client = served.client()
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    talk: list[Any] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    create: Any = client.chat.completions.create
    once = create(model="tested", messages=talk, tools=TOOLS, parallel_tool_calls=False, reasoning_effort="low")
    assert len(once.choices[0].message.tool_calls) == 1
    none = create(model="tested", messages=talk, tools=TOOLS, tool_choice="none").choices[0]
    assert none.message.content == "It is warm." + CALL + CALL and none.message.tool_calls is None
    assert none.finish_reason == "stop"
    short = create(model="tested", messages=talk, tools=TOOLS, max_tokens=60, n=2)
    assert [choice.finish_reason for choice in short.choices] == ["length", "length"]
    assert short.choices[1].message.tool_calls[0].function.name == "get_weather"
    with pytest.raises(openai.BadRequestError, match="none of tools") as refused:
        create(model="tested", messages=ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}})
    assert refused.value.param == "tool_choice"


def test_the_helpers_of_the_client_run_a_tool_loop(served: Served, speaker: Scripted) -> None:
    """`chat.completions.stream` collects events by itself: it checks indexes, ids and types of what comes."""
    use(served, "hermes")
    speaker.say("Yes. " + CALL)
    with served.client().chat.completions.stream(model="tested", messages=ASK, tools=TOOLS) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    assert final.message.content == "Yes." and final.message.tool_calls is not None
    assert json.loads(final.message.tool_calls[0].function.arguments)["days"] == 3


@pytest.mark.parametrize("sample", sweep(SAMPLES, 3), ids=lambda sample: f"{sample.parser} {sample.name}")
def test_a_byte_a_delta_adds_up_to_the_whole(sample: Sample, speaker: Scripted) -> None:
    tokens = speaker.say(sample.text)
    options: Any = {"tools": TOOLS, "tool_parser": sample.parser, "reasoning_parser": "think"}
    (whole,) = speaker.llm.chat(ASK, **options)
    chat = speaker.llm.chats(None, sample.parser, "think")
    deltas = list(speaker.llm.stream_chat(ASK, chat=chat, tools=TOOLS))
    assert len(deltas) == len(tokens) + 1, "a delta a token"
    message = ChatMessage().extend(event for delta in deltas for event in delta.events)
    calls = [(call.name, call.arguments) for call in whole.tool_calls]
    assert (
        (message.content, message.reasoning) == (whole.content, whole.reasoning) == (sample.content, sample.reasoning)
    )
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert "\N{REPLACEMENT CHARACTER}" not in repr(deltas)


def test_llm_chat_gives_messages_with_calls(speaker: Scripted) -> None:
    speaker.say("<think>Hm</think>Yes.\n" + CALL)
    options: Any = {"tools": TOOLS, "tool_parser": "hermes", "reasoning_parser": "think"}
    first, second = speaker.llm.chat([ASK, ASK], **options)
    assert (first.content, first.reasoning, first.finish_reason) == ("Yes.", "Hm", "tool_calls")
    assert first.reasoning_tokens == 4 and first.output.token_ids == second.output.token_ids
    again = first.message()
    assert json.loads(again["tool_calls"][0]["function"]["arguments"])["days"] == 3
    (third,) = speaker.llm.chat([*ASK, again, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "9"}])
    assert third.content == "<think>Hm</think>Yes.\n" + CALL, "without tools and parsers it is text"
    deltas = list(speaker.llm.stream_chat(ASK, chat=speaker.llm.chats(None, "hermes", "think"), tools=TOOLS))
    assert deltas[-1].finish_reason == "tool_calls" and deltas[-1].metrics is not None


def test_the_built_in_model_calls_under_constraint(embedded: Any) -> None:
    """tool_choice="required", named, and strict arguments: whatever the model would say, its calls fit."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
    with serving(embedded, chat_template=None) as served:
        create: Any = served.client().chat.completions.create
        named = {"type": "function", "function": {"name": "weather"}}
        for choice, sampling in (("required", {"temperature": 0}), (named, {"temperature": 1, "seed": 3})):
            ask = {"model": "tested", "messages": ASK, "tools": tools, "tool_choice": choice, **sampling}
            ask |= {"parallel_tool_calls": False, "max_tokens": 100}
            _, _, ((name, arguments),), reason, _ = assembled(create(stream=True, **ask))
            assert (name, reason) == ("weather", "tool_calls")
            jsonschema.validate(json.loads(arguments), schema)
        (call,) = create(**ask).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", arguments)
        served.wait_until_idle()


def test_a_system_prompt_is_computed_once(speaker: Scripted) -> None:
    """The second conversation after it finds a state at its end, where a boundary was marked."""
    speaker.say("Yes.")
    speaker.llm.reset_prefix_cache()
    system = {"role": "system", "content": "Be kind, and brief. " * 10}
    asks = [[system, {"role": "user", "content": f"{i} is a question of its own. " * 5}] for i in range(2)]
    (first,), (second,) = (speaker.llm.chat(ask) for ask in asks)
    assert first.output.metrics.cached_tokens == 0
    start = len(f"system: {system['content']}\nuser: ")
    assert second.output.metrics.cached_tokens == start // 16 * 16


def test_samples_cover_every_registered_format() -> None:
    assert {sample.parser for sample in SAMPLES} == set(TOOL_PARSERS.built_in)
    assert DALLAS["days"] == 3


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=5), st.just("{{ 7 * 7 }}")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "function",
                    "name",
                    "parameters",
                    "properties",
                    "$ref",
                    "$defs",
                    "anyOf",
                    "enum",
                    "description",
                    "strict",
                    "arguments",
                    "id",
                    "a",
                    "__class__",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
functions = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "g", "{{x}}", "</tool>"])},
            optional={"parameters": plain, "strict": st.booleans(), "description": plain},
        ),
    }
)
choices = st.one_of(st.sampled_from([None, "auto", "none", "required"]), plain)
histories = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.text(max_size=5)},
        optional={"tool_calls": plain, "name": plain, "reasoning_content": plain},
    ),
    min_size=1,
    max_size=3,
)


def attack(served: Served, speaker: Scripted, examples: int) -> None:
    """Odd tools, choices, histories and answers: an answer or a 4xx, and nothing left behind."""
    syntax = st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": {',
            '"a": ',
            "}",
            "[",
            "<function=f>",
            "<parameter=a>",
            "\n",
            "</think>",
            "<think>",
            "'",
            '"',
            "\\u12",
            "é",
            "<|tool_call_start|>[f(a=",
            ")]",
            "1e5",
            "<TOOLCALL>[",
        ]
    )
    answers = st.lists(st.one_of(syntax, st.text(max_size=4)), max_size=12).map("".join)
    parsers = st.sampled_from(sorted(TOOL_PARSERS.built_in))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(parsers, histories, st.lists(st.one_of(functions, plain), max_size=2), choices, answers, st.booleans())
    @example("hermes", ASK, [{"type": "function", "function": {"name": "f"}}], "required", "no call", True)
    @example("lfm2", ASK, [{"type": "function", "function": {"name": "f", "strict": True}}], "auto", "<|tool_", False)
    def one(parser: str, messages: Any, tools: Any, choice: Any, answer: str, stream: bool) -> None:
        use(served, parser)
        speaker.say(answer.encode("utf-8", "ignore").decode())
        body = {"messages": messages, "tools": tools, "tool_choice": choice, "stream": stream, "max_tokens": 40}
        with served.http() as client:
            sent = client.post(
                "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
            )
        assert sent.status_code < 500, (sent.text, body)

    one()
    served.wait_until_idle()


def test_odd_tools_and_answers(served: Served, speaker: Scripted) -> None:
    attack(served, speaker, 25)


@pytest.mark.slow
def test_more_odd_tools_and_answers(served: Served, speaker: Scripted) -> None:
    attack(served, speaker, 60)
