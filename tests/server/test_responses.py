"""/v1/responses with OpenAI's client, over a model that says what a script says: streamed equals whole."""

import json
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.events import Content
from hybridrt.chat.reasoning import THINK
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.text_tokens import TextTokens
from tests.support.chat_samples import TOOLS
from tests.support.http_server import Served, serving
from tests.support.lazily import lazily
from tests.support.scripted_llm import Scripted, scripted

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SAID = f"<think>\nHm é.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
FUNCTIONS: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
HELLO: Any = {"model": "tested", "input": "Hello"}
SCRIPTS = {"text": "Grüezi!", "thought": "<think>\nHm é.\n</think>\n\nSo.", "calls": SAID, "nothing": ""}


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with (
        scripted() as model,
        serving(model.llm, chat_template=None, tool_parser="hermes", reasoning_parser="think") as served,
    ):
        yield served, model


def plain(response: Any) -> dict[str, Any]:
    """A response without what differs from one request to the next."""
    found: dict[str, Any] = json.loads(response.to_json())
    for thing in (found, *found["output"]):
        for name in ("id", "created_at", "call_id"):
            thing.pop(name, None)
    for thing in (*found["output"], *(part for item in found["output"] for part in item.get("content", ()))):
        for name in ("parsed", "parsed_arguments"):  # the client's own
            thing.pop(name, None)
    found["usage"]["input_tokens_details"].pop("cached_tokens")
    return found


def check(event: Any) -> Any:
    """An event, which has every field that OpenAI's client declares as required."""
    return type(event).model_validate(event.to_dict())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stream_adds_up_to_the_whole(script: str, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(SCRIPTS[script])
    asked: Any = {"model": "tested", "input": "Hello", "tools": FUNCTIONS, "max_output_tokens": 400}
    client = served.client()
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert plain(final) == plain(check(whole))
    assert all(map(check, client.responses.create(**asked, stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    check_items(events[2:-1], whole.output)
    assert whole.usage is not None and whole.usage.output_tokens == len(model.say(SCRIPTS[script])) + 1
    assert whole.output and whole.status == "completed" and whole.store is True  # type: ignore[attr-defined]


NAMES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def check_items(events: list[Any], items: list[Any]) -> None:
    """Each item begins, grows and ends before the next one begins."""
    for index, item in enumerate(items):
        mine = [event for event in events if event.output_index == index]
        assert mine == events[: len(mine)]
        events = events[len(mine) :]
        kinds = [event.type.removeprefix("response.") for event in mine]
        name = NAMES[item.type]
        part = [] if item.type == "function_call" else ["content_part"]
        before, after = [f"{p}.added" for p in part], [f"{name}.done", *(f"{p}.done" for p in part)]
        deltas = [event.delta for event in mine if event.type == f"response.{name}.delta"]
        assert kinds == [
            "output_item.added", *before, *[f"{name}.delta"] * len(deltas), *after, "output_item.done"
        ]  # fmt: skip
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    assert events == []


def test_items_of_an_answer(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(SAID)
    got = served.client().responses.create(model="tested", input="Hello", tools=FUNCTIONS)
    thought, text, *calls = got.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm é.")  # type: ignore[union-attr,index]
    assert (text.type, got.output_text) == ("message", "Let me see.")
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("get_weather", {"city": "Zürich"})] * 2  # type: ignore[union-attr]
    assert len({c.call_id for c in calls}) == 2  # type: ignore[union-attr]
    assert got.usage is not None and got.usage.output_tokens_details.reasoning_tokens > 0


def test_reasoning_can_be_left_out(talker: tuple[Served, Scripted]) -> None:
    """vLLM's field. The tokens of the reasoning are counted as before."""
    served, model = talker
    model.say(SAID)
    options: Any = {"model": "tested", "input": "Hello", "extra_body": {"include_reasoning": False}}
    got = served.client().responses.create(**options)
    assert [item.type for item in got.output] == ["message"]
    assert got.usage is not None and got.usage.output_tokens_details.reasoning_tokens > 0
    events = list(served.client().responses.create(**options, stream=True))
    assert not any("reasoning" in event.type for event in events)


def test_a_conversation_continues_with_its_own_items(talker: tuple[Served, Scripted]) -> None:
    """What was answered is input of the next request, and the template sees one message of the assistant."""
    served, model = talker
    model.say(SAID)
    client = served.client()
    first = client.responses.create(model="tested", input="Hello", tools=FUNCTIONS)
    model.say("Fine.")
    call: Any = first.output[2]
    more: Any = [
        {"role": "developer", "content": "And mild."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        *[item.to_dict() for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"},
    ]
    got = client.responses.create(model="tested", instructions="Be brief.", input=more)
    assert got.output_text == "Fine." and got.usage is not None
    calls = [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
        for c in first.output[2:]  # type: ignore[union-attr]
    ]
    text = f"system: Be brief.\n\nAnd mild.\nuser: Hello\nassistant: Let me see.{calls}\ntool: Rain\nassistant: "
    assert model.llm.tokenizer is not None
    assert got.usage.input_tokens == len(model.llm.tokenizer.encode_bare(text))


def test_an_answer_that_is_cut_is_incomplete(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("Grüezi mitenand")
    asked: Any = {"model": "tested", "input": "Hello", "max_output_tokens": 4}
    whole = served.client().responses.create(**asked)
    last = list(served.client().responses.create(**asked, stream=True))[-1]
    assert (whole.status, last.type) == ("incomplete", "response.incomplete")
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text == "Grü" and whole.output[0].status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "some"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "much"}}, "reasoning"),
        ({"tools": [{"type": "telepathy"}]}, "tools.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"input": [{"type": "dream"}]}, "input.0"),
        ({"input": []}, "input"),
        ({"tool_choice": {"type": "function", "name": "none"}, "tools": FUNCTIONS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": FUNCTIONS}, "tool_choice"),
        ({"tool_choice": 5, "tools": FUNCTIONS}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 65}, "top_logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_cannot_be_done_names_its_field(body: dict[str, Any], param: str, talker: tuple[Served, Scripted]) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        talker[0].client().responses.create(model="tested", input="Hello", extra_body=body)
    assert info.value.param == param, info.value


INCLUDE: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("stop", [None, "ezi m", "t me see"])
@pytest.mark.parametrize("script", [*SCRIPTS.values(), "Grüezi mitenand <b ", CALL + " 😀 and é"])
def test_log_probabilities_stand_beside_the_text(
    script: str, stop: str | None, talker: tuple[Served, Scripted]
) -> None:
    """Those of the text's tokens, which are bytes, and of no others."""
    served, model = talker
    model.say(script)
    asked: Any = {"model": "tested", "input": "Hello", "tools": FUNCTIONS, "include": INCLUDE, "top_logprobs": 1}
    asked["extra_body"] = {"stop": stop}
    client = served.client()
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert plain(final) == plain(whole)
    texts = [item.content[0] for item in whole.output if item.type == "message"]
    for text in texts:
        assert bytes(byte for token in text.logprobs for byte in token.bytes).decode() == text.text
        assert all(token.logprob == -0.5 and len(token.top_logprobs) == 1 for token in text.logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [len(event.logprobs) for event in deltas] == [len(event.delta.encode()) for event in deltas]
    done = [event for event in events if event.type == "response.output_text.done"]
    assert [[token.logprob for token in event.logprobs] for event in done] == [[-0.5] * len(t.logprobs) for t in texts]


def test_log_probabilities_of_a_real_model_are_those_of_its_chat(served: Served) -> None:
    asked: Any = {"model": "tested", "temperature": 0}
    chat = served.client().chat.completions.create(
        messages=[{"role": "user", "content": "def f("}], max_tokens=20, logprobs=True, top_logprobs=2, **asked
    )
    got = served.client().responses.create(
        input="def f(", max_output_tokens=20, include=INCLUDE, top_logprobs=2, **asked
    )
    content: Any = got.output[0].content[0]  # type: ignore[union-attr]
    assert chat.choices[0].logprobs is not None and content.text == chat.choices[0].message.content
    want = [entry.to_dict() for entry in chat.choices[0].logprobs.content or ()]
    assert [entry.to_dict() for entry in content.logprobs] == want and len(want) == 20


class Spelled:
    """A tokenizer without spaces before words, and with a special token that no text shows."""

    words = ("<s>", "So", "it", "is", "so", "<think>", "</think>")

    def spelled(self, token: int) -> bytes:
        return self.words[token].encode()

    def entry(self, token: int, found: dict[int, float], most: int) -> dict[str, Any]:
        return {"token": token, "bytes": list(self.spelled(token))}


@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_text_do_not_depend_on_the_deltas(seed: int) -> None:
    """Several tokens a delta, and text that comes later than its tokens."""
    rng, tokens, told = random.Random(seed), [5, 4, 3, 0, 6, 1, 2, 3, 0, 4, 0], 0
    texts = list(accumulate(["<think>", "so", " is", "", "</think>", " So", " it", " is", "", " so", ""]))
    reader, parser = TextTokens(Spelled(), 0), AnswerParser(None, THINK)  # type: ignore[arg-type]
    told, said, taken, content = 0, 0, list[int](), ""
    while told < len(tokens):
        fresh = tokens[told : told + rng.randrange(1, 4)]
        told += len(fresh)
        last = told == len(tokens)
        text = texts[told - 1][said : None if last else max(said, len(texts[told - 1]) - rng.randrange(5))]
        said += len(text)
        delta = Delta("x", 0, fresh, text, [{token: -1.0} for token in fresh], "stop" if last else None)
        for piece, _, reason in reader.pieces(delta):
            for event in parser.feed(piece) + (parser.finish() if reason else []):
                found = reader.tokens_of_text(event.text)  # type: ignore[union-attr]
                if isinstance(event, Content):
                    content += event.text
                    taken += [entry["token"] for entry in found]
    assert (content, taken) == (" So it is so", [1, 2, 3, 4])


def failed(served: Served, text: str, **options: Any) -> None:
    """Asks for a stream that ends with a failure of this text, and with no event that lacks a field."""
    events = [check(event) for event in served.client().responses.create(**HELLO, stream=True, **options)]
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error is not None and text in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.usefixtures("broken_streams")
def test_a_failure_within_a_stream_is_an_event(talker: tuple[Served, Scripted]) -> None:
    failed(talker[0], "the device is gone")


def test_what_ends_a_stream_from_outside_is_an_event_of_it(
    talker: tuple[Served, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline, and an error of no known type."""
    served, model = talker
    model.say("a" * 7000)
    failed(served, "longer than it may", extra_headers={"X-Request-Timeout": "0.1"})
    monkeypatch.setattr(DeltaStream, "__anext__", lambda deltas: 1 // 0)
    failed(served, "its log says why")


def test_an_aborted_answer_is_cancelled(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("a" * 7000)
    with served.llm.engine.turns:  # the answer cannot end before it is aborted
        events = served.client().responses.create(
            model="tested", input="Hello", stream=True, extra_body={"request_id": "mine"}
        )
        first = next(iter(events))
        assert first.response.id == "resp_mine"  # type: ignore[union-attr]
        assert served.post("/abort", {"request_id": "mine"}).json() == {"aborted": True}
    *_, last = events
    assert last.type == "response.incomplete" and last.response.status == "cancelled"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Genf"]
    open: bool


def test_a_forced_call_of_a_real_model(served: Served) -> None:
    tool: Any = {"type": "function", "name": "visit", "strict": True, "parameters": Place.model_json_schema()}
    asked: Any = {"model": "tested", "input": "Hello", "tools": [tool], "parallel_tool_calls": False}
    whole = served.client().responses.create(**asked, tool_choice="required")
    with served.client().responses.stream(**asked, tool_choice={"type": "function", "name": "visit"}) as stream:
        final = stream.get_final_response()
    for answer in (whole, final):
        (call,) = answer.output
        assert call.type == "function_call" and call.name == "visit" and answer.status == "completed"
        Place.model_validate_json(call.arguments)


def test_text_in_a_format_of_a_real_model(served: Served) -> None:
    got = served.client().responses.parse(model="tested", input="Hello", text_format=Place, temperature=0)
    assert isinstance(got.output_parsed, Place)
    with pytest.raises(openai.BadRequestError) as info:
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}
        served.client().responses.create(model="tested", input="Hello", text=form)
    assert info.value.param == "text"


@pytest.mark.parametrize("field", ["metadata", "tools"])
def test_what_cannot_be_repeated_is_refused(field: str, talker: tuple[Served, Scripted]) -> None:
    """Not rendered, and so not checked by anything else."""
    given = r'{"a": "\ud800"}'
    if field == "tools":
        given = f'[{{"type": "function", "name": "f", "parameters": {given}}}]'
    body = f'{{"input": "hi", "tool_choice": "none", "max_output_tokens": 1, "{field}": {given}}}'
    with talker[0].http() as http:
        answer = http.post("/v1/responses", content=body.encode(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
