"""Answers that end within a character, a tag or a call: on every endpoint, streamed and not, nothing of it is seen."""

from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import ChatMessage
from tests.support.chat_samples import TOOLS
from tests.support.http_server import Served, serving
from tests.support.levels import sweep
from tests.support.scripted_llm import Scripted, byte_tokenizer, scripted

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
# The byte tokenizer has no token for these tags, so that an answer may end within one.
ANSWER = 'é😀 <TOOLCALL>[{"name": "now", "arguments": {"a": "é"}}]'


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    options: Any = {"chat_template": None, "tool_parser": "nemotron", "reasoning_parser": "think"}
    with scripted() as model, serving(model.llm, **options) as served:
        yield served, model


@pytest.mark.parametrize(("reason", "content"), [("length", ""), ("abort", ""), ("stop", "<TOOLC")])
def test_the_finish_reason_tells_half_a_tag_from_text(reason: Any, content: str) -> None:
    answer = Chat(byte_tokenizer(), tool_parser="nemotron").prompt(read_conversation(ASK, TOOLS), SamplingParams())
    reader = answer.new_answer()
    reader.read("<TOOLC", (), reason)
    assert reader.message.content == content and reader.finish_reason == reason


def test_a_cut_at_every_byte(talker: tuple[Served, Scripted]) -> None:
    """Streamed and whole answers are the same, and a beginning of what the model would have said."""
    _, model = talker
    chat = model.llm.chats(None, "nemotron", "think")
    for place in range(1, len(model.say(ANSWER))):
        params = SamplingParams(max_tokens=place, n=2)
        (whole,) = model.llm.chat(ASK, params, tools=TOOLS, tool_parser="nemotron", reasoning_parser="think")
        streamed = [ChatMessage(), ChatMessage()]
        for delta in model.llm.stream_chat(ASK, params, chat=chat, tools=TOOLS):
            streamed[delta.index].extend(delta.events)
        for message, sample in zip(streamed, whole.outputs, strict=True):
            arguments = "".join(call.arguments for call in sample.tool_calls)
            assert (message.content, "".join(call.arguments for call in message.tool_calls)) == (
                sample.content,
                arguments,
            )
            assert "é😀".startswith(sample.content.rstrip()) and '{"a": "é"}'.startswith(arguments), place
            assert sample.finish_reason == "length"
    model.say(ANSWER[:8])
    (ended,) = model.llm.chat(ASK, tools=TOOLS, tool_parser="nemotron")
    assert ended.content == ANSWER[:8] and ended.finish_reason == "stop"


@pytest.mark.parametrize("place", sweep([9, 4], 2))
def test_no_endpoint_shows_half_a_tag(place: int, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(ANSWER)
    wanted = "é" if place == 4 else "é😀"
    tools = [{"type": "function", "name": "now"}]
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "max_tokens": place}),
        ("/v1/messages", {"messages": ASK, "tools": [{"name": "now", "input_schema": {}}], "max_tokens": place}),
        ("/v1/responses", {"input": ASK, "tools": tools, "max_output_tokens": place}),
    ]
    for path, body in bodies:
        for stream in (False, True):
            answer = served.post(path, body | {"stream": stream})
            assert answer.status_code == 200 and wanted[-1] in answer.text
            assert "<" not in answer.text and "\N{REPLACEMENT CHARACTER}" not in answer.text, (path, answer.text)
    scored = bodies[-1][1] | {"include": ["message.output_text.logprobs"]}
    (item,) = served.post("/v1/responses", scored).json()["output"]
    assert item["content"][0]["text"].rstrip() == wanted
