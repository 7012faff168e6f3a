"""Answers in OpenAI's Harmony format, cut at every place."""

import json
from typing import Any

import pytest

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import ChatMessage, Event
from hybridrt.chat.harmony import HarmonyParser
from hybridrt.chat.reasoning import HARMONY
from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS, choose
from hybridrt.chat.tool_parser import ToolParser
from hybridrt.chat.tool_parsers.forced import ForcedCalls
from hybridrt.chat.tool_parsers.harmony import Harmony
from hybridrt.engine.text.tokenizer import HFTokenizer
from tests.chat.test_constraints import compiler_of, takes
from tests.support.chat_samples import DALLAS, SCHEMAS, TOOLS
from tests.support.scripted_llm import byte_tokenizer

# What the published template does with turns of the assistant, shortened.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    '{# <|channel|>analysis "functions." <|channel|>commentary json<|message|> <|call|> #}'
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>Two days?\nThree.<|end|><|start|>assistant"
CALL = ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Dallas", "days": 3}'
PLAIN, CALLING = ForcedCalls, Harmony
# Text, content, reasoning, calls.
SAMPLES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (f"{THOUGHT}<|channel|>final<|message|>Hi <there>.<|return|>", "Hi <there>.", "Two days?\nThree.", []),
    ("<|channel|>final<|message|>Hi.", "Hi.", "", []),
    ("Hi.", "Hi.", "", []),
    (f"{THOUGHT}<|channel|>commentary{CALL}<|call|>", "", "Two days?\nThree.", [("get_weather", DALLAS)]),
    (f"{THOUGHT}<|channel|>commentary{CALL}", "", "Two days?\nThree.", [("get_weather", DALLAS)]),
    (' to=functions.now<|channel|>commentary json<|message|>{}<|call|>', "", "", [("now", {})]),
    (
        f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
        f"commentary json<|message|>{{}}<|call|><|start|>assistant<|channel|>commentary{CALL}<|call|>",
        "I look.", "Two days?\nThree.", [("now", {}), ("get_weather", DALLAS)],
    ),
    (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary<|message|>A<|end|>"
        f"<|start|>assistant{THOUGHT}<|channel|>final<|message|>B", "A\n\nB", "One.\n\nTwo days?\nThree.", [],
    ),
    ("<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>So", "So", "Hm", []),
    ("<|channel|>commentary to=functions.now json<|message|>{}]<|call|>", "]", "", [("now", {})]),
]  # fmt: skip


def read(
    text: str, pieces: list[str], tools: type[ToolParser] | None = Harmony, truncated: bool = False
) -> ChatMessage:
    parser = HarmonyParser(None if tools is None else tools(SCHEMAS), HARMONY)
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    return ChatMessage().extend(events + parser.finish(truncated))


def plain(message: ChatMessage) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), SAMPLES)
def test_a_sample_is_read_alike_however_it_is_cut(
    text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    whole = plain(read(text, [text]))
    assert whole[:2] == (content, reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in whole[2]] == calls
    for pieces in (list(text), *([text[:i], text[i:]] for i in range(1, len(text)))):
        assert plain(read(text, pieces)) == whole, pieces


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), SAMPLES)
def test_a_truncated_answer_is_the_beginning_of_the_whole(
    text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    """Nothing of a header is ever text."""
    whole = plain(read(text, [text]))
    for end in range(1, len(text)):
        cut = plain(read(text, [text[:end]], truncated=True))
        assert content.startswith(cut[0]) and reasoning.startswith(cut[1]), end
        for (name, arguments), (wanted, all_of_it) in zip(cut[2], whole[2]):
            assert name == wanted and all_of_it.startswith(arguments), end


def test_calls_that_no_one_offered_and_headers_that_do_not_end_are_content() -> None:
    assert plain(read(CALL, [CALL], tools=None)) == ('{"city": "Dallas", "days": 3}', "", [])
    for text in ("<|channel|>final", "<|channel|>final x<|end|>"):
        assert plain(read(text, [text])) == (text.removesuffix("<|end|>"), "", [])
    bad = "<|channel|>commentary to=functions.now<|message|>city"
    assert plain(read(bad, [bad])) == (bad, "", [])


def test_forced_calls_are_in_the_final_message() -> None:
    text = f'{THOUGHT}<|channel|>final<|message|>[{{"name": "now", "arguments": {{}}}}]'
    assert plain(read(text, [text], tools=ForcedCalls)) == ("", "Two days?\nThree.", [("now", "{}")])


def test_the_template_tells_the_format() -> None:
    assert choose(TOOL_PARSERS, "auto", TEMPLATE) is Harmony and choose(REASONING_PARSERS, "auto", TEMPLATE) is HARMONY


TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return byte_tokenizer(TAGS)


USER = {"role": "user", "content": "Hi"}
JSON = StructuredOutputs(json={"type": "integer"})


@pytest.mark.parametrize(("fields", "given", "text", "taken"), [
    ({"tools": TOOLS, "tool_choice": "required"}, None,
     '<|channel|>final<|message|>[{"name": "now", "arguments": {}}]', True),
    ({"tools": TOOLS, "tool_choice": "required"}, None,
     f'{THOUGHT}<|channel|>final<|message|>[{{"name": "now", "arguments": {{}}}}]', True),
    ({"tools": TOOLS, "tool_choice": "required"}, None, '[{"name": "now"', False),
    ({}, JSON, f"{THOUGHT}<|channel|>final<|message|>12", True), ({}, JSON, "<|channel|>final<|message|>12", True),
    ({}, JSON, "<|channel|>final<|message|>x", False), ({}, JSON, "12", False),
    ({"messages": [USER, {"role": "assistant", "content": "1"}], "continue_final_message": True,
      "add_generation_prompt": False}, JSON, "12", True),
])  # fmt: skip
def test_grammars_begin_after_the_header(
    tokenizer: HFTokenizer, fields: dict[str, Any], given: StructuredOutputs | None, text: str, taken: bool
) -> None:
    talk = read_conversation(**{"messages": [USER], **fields})
    wanted = Chat(tokenizer, template=TEMPLATE).prompt(talk, SamplingParams(structured_outputs=given)).params
    assert wanted.structured_outputs is not None
    matcher = compiler_of(tokenizer).matcher(wanted.structured_outputs)
    fits = takes(matcher, tokenizer.encode_bare(text))
    assert fits == taken and (not taken or matcher.inner.is_accepting())


def test_tags_that_are_no_tokens_leave_no_room_for_reasoning() -> None:
    """Text would hold them too."""
    chat = Chat(byte_tokenizer(), template=TEMPLATE)
    wanted = chat.prompt(read_conversation([USER]), SamplingParams(structured_outputs=JSON)).params
    matcher = compiler_of(byte_tokenizer()).matcher(wanted.structured_outputs)  # type: ignore[arg-type]
    assert takes(matcher, byte_tokenizer().encode_bare("<|channel|>final<|message|>12"))


def test_what_the_format_cannot_do_is_refused() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    chat = Chat(byte_tokenizer(TAGS), template=TEMPLATE)
    for fields, text in (({"thinking_budget": 3}, "thinking budget"), ({"tools": [strict]}, "leave strict out")):
        with pytest.raises(RequestError, match=text):
            chat.prompt(read_conversation(messages=[USER], **fields), SamplingParams())
