"""Every format's samples, cut at every place: the events add up to what the sample is."""

import json
from collections.abc import Sequence
from contextlib import suppress

import pytest

from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.events import CallArguments, CallBegin, CallEnd, ChatMessage, Content, Event, Reasoning
from hybridrt.chat.reasoning import GRANITE, THINK
from hybridrt.chat.registry import TOOL_PARSERS
from hybridrt.chat.tool_parsers.forced import ForcedCalls
from tests.support.chat_samples import SAMPLES, SCHEMAS, Sample
from tests.support.levels import sweep


def events(sample: Sample, pieces: Sequence[str], truncated: bool = False) -> list[Event]:
    parser = AnswerParser(TOOL_PARSERS.load(sample.parser)(SCHEMAS), THINK)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish(truncated)


def plain(message: ChatMessage) -> tuple[str, str, list[tuple[str, str]]]:
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.parser} {sample.name}")
def test_a_sample_is_read_alike_however_it_is_cut(sample: Sample) -> None:
    text = sample.text
    whole = ChatMessage().extend(events(sample, [text]))
    assert (whole.content, whole.reasoning) == (sample.content, sample.reasoning)
    assert [call.name for call in whole.tool_calls] == [name for name, _ in sample.calls]
    for call, (_, wanted) in zip(whole.tool_calls, sample.calls, strict=True):
        if wanted is not None:
            assert json.loads(call.arguments) == wanted
            continue
        with pytest.raises(ValueError):
            json.loads(call.arguments)
    cuts = [list(text), *([text[:i], text[i:]] for i in range(1, len(text), 1 + len(text) // 100))]
    for pieces in cuts:
        found = events(sample, pieces)
        check_order(found)
        assert plain(ChatMessage().extend(found)) == plain(whole), pieces


def check_order(found: list[Event]) -> None:
    """A call's events stand together, in order; no event is empty."""
    inside = None
    for event in found:
        match event:
            case CallBegin():
                assert inside is None and event.name
                inside = event.index
            case CallArguments():
                assert event.index == inside and event.text
            case CallEnd():
                assert event.index == inside
                inside = None
            case Content() | Reasoning():
                assert event.text
    assert inside is None


@pytest.mark.parametrize(
    "call", [r'{"name": "\ud800", "arguments": {}}', r'{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}']
)
def test_a_call_with_a_lone_surrogate_is_content(call: str) -> None:
    """No encoding takes one: an answer that held it could not be sent."""
    text = f"<tool_call>{call}</tool_call>"
    parser = AnswerParser(TOOL_PARSERS.load("hermes")({}))
    assert plain(ChatMessage().extend(parser.feed(text) + parser.finish())) == (text, "", [])


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.calls], ids=lambda s: f"{s.parser} {s.name}")
def test_no_tag_and_no_syntax_of_a_call_is_ever_content(sample: Sample) -> None:
    text = "".join(event.text for event in events(sample, list(sample.text)) if isinstance(event, Content))
    assert sample.content.startswith(text) or text == sample.content


@pytest.mark.parametrize(
    "sample",
    [s for s in SAMPLES if s.calls and all(wanted is not None for _, wanted in s.calls)],
    ids=lambda s: f"{s.parser} {s.name}",
)
def test_an_answer_that_breaks_off_has_no_half_call_and_no_syntax_behind_a_call(sample: Sample) -> None:
    """The arguments of a call that has begun are no JSON, or all that the model meant."""
    for end in range(1, len(sample.text)):
        message = ChatMessage().extend(events(sample, [sample.text[:end]]))
        for call, (_, wanted) in zip(message.tool_calls, sample.calls):
            with suppress(ValueError):
                assert json.loads(call.arguments) == wanted, end
        if message.tool_calls:
            opening = TOOL_PARSERS.load(sample.parser).opens[0]
            shown = message.content.partition(opening)[0].rstrip()  # a further section that has not become a call
            assert sample.content.startswith(shown) or opening.startswith(shown[shown.rindex("<") :]), end


@pytest.mark.parametrize("sample", sweep(SAMPLES, 2), ids=lambda sample: f"{sample.parser} {sample.name}")
def test_a_truncated_answer_is_the_beginning_of_the_whole(sample: Sample) -> None:
    """Of its content, its reasoning and each call's arguments: wherever it was cut, nothing of a tag or of a call's
    syntax is in them."""
    content, reasoning, calls = plain(ChatMessage().extend(events(sample, [sample.text])))
    for end in range(1, len(sample.text)):
        cut = plain(ChatMessage().extend(events(sample, [sample.text[:end]], truncated=True)))
        assert content.startswith(cut[0].rstrip()) and reasoning.startswith(cut[1]), end
        assert len(cut[2]) <= len(calls), end
        for (name, arguments), whole in zip(cut[2], calls):
            assert name == whole[0] and whole[1].startswith(arguments), end
        if end % 10 == 0:
            assert cut == plain(ChatMessage().extend(events(sample, list(sample.text[:end]), truncated=True))), end


@pytest.mark.parametrize(
    ("text", "inside", "truncated", "ended"),
    [
        ("So. <tool_ca", False, ("", "So. "), ("", "So. <tool_ca")),
        ("So.\n<tool_call>", False, ("", "So."), ("", "So.\n<tool_call>")),
        ('<tool_call>{"name": "no', False, ("", ""), ("", '<tool_call>{"name": "no')),
        ("a <", False, ("", "a "), ("", "a <")),
        ("<thi", False, ("", ""), ("", "<thi")),
        ("\n<think", False, ("", "\n"), ("", "\n<think")),
        ("a </thi", True, ("a", ""), ("a </thi", "")),
        ("a \n", True, ("a", ""), ("a", "")),
        ("<think>a</think>b<|pa", False, ("a", "b"), ("a", "b<|pa")),
        ("a <think", False, ("", "a <think"), ("", "a <think")),
    ],
)
def test_half_a_tag_is_text_only_if_the_model_has_ended(
    text: str, inside: bool, truncated: tuple[str, str], ended: tuple[str, str]
) -> None:
    for cut, wanted in ((True, truncated), (False, ended)):
        for pieces in ([text], list(text)):
            parser = AnswerParser(TOOL_PARSERS.load("hermes")({}), THINK, in_reasoning=inside, dropped=["<|pad|>"])
            message = ChatMessage().extend([e for piece in pieces for e in parser.feed(piece)] + parser.finish(cut))
            assert (message.reasoning, message.content) == wanted


def test_forced_calls_that_break_off_leave_no_content() -> None:
    text = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    for end in range(1, len(text)):
        parser = AnswerParser(ForcedCalls(SCHEMAS))
        message = ChatMessage().extend(parser.feed(text[:end]) + parser.finish())
        assert message.content == "" and len(message.tool_calls) <= 2, end


def test_text_behind_a_call_that_is_none_stays_though_another_section_ran_to_the_end() -> None:
    text = """<tool_call>{"x": 'a <tool_call>{"name": "now"} so</tool_call>"""
    parser = AnswerParser(TOOL_PARSERS.load("hermes")(SCHEMAS))
    message = ChatMessage().extend(parser.feed(text) + parser.finish())
    assert plain(message) == ("""<tool_call>{"x": 'aso</tool_call>""", "", [("now", "{}")])


def test_arguments_stream_while_they_are_written() -> None:
    parser = AnswerParser(TOOL_PARSERS.load("hermes")(SCHEMAS))
    assert parser.feed('<tool_call>{"name": "now", "arguments": {') == []
    begin, arguments = parser.feed('"city": "Dal')
    assert isinstance(begin, CallBegin) and begin.name == "now" and begin.id.startswith("call_")
    assert arguments == CallArguments(0, '{"city": "Dal')
    assert parser.feed("las") == [CallArguments(0, "las")]
    parser = AnswerParser(TOOL_PARSERS.load("qwen3_coder")(SCHEMAS))
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.feed("Dal\n</para") == [CallArguments(0, "Dal")]
    assert parser.feed("graph") == [CallArguments(0, "\\n</paragraph")]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\na\n\nb\n</think>\n\nc", False, "a\n\nb", "c"),
        ("a\n</think>\n\nc</think>d<think>", True, "a", "c</think>d<think>"),
        ("<think>a</think>b", True, "a", "b"),
        ("\n<think>a", False, "a", ""),
        ("b <think>a</think>", False, "", "b <think>a</think>"),
        ("<thin", False, "", "<thin"),
        ("a </thin", True, "a </thin", ""),
        ("</think>\n\nb", True, "", "b"),
        (" \n b \n", False, "", " \n b \n"),
    ],
)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(None, THINK, in_reasoning=inside)
        message = ChatMessage().extend([e for piece in pieces for e in parser.feed(piece)] + parser.finish())
        assert (message.reasoning, message.content) == (reasoning, content)


def test_reasoning_in_sentences() -> None:
    text = "Here is my thought process:\n\nTwo and two.\n\nHere is my response:\n\nFour."
    for pieces in ([text], list(text)):
        parser = AnswerParser(None, GRANITE)
        message = ChatMessage().extend([e for piece in pieces for e in parser.feed(piece)] + parser.finish())
        assert (message.reasoning, message.content) == ("Two and two.", "Four.")


def test_without_parsers_text_is_passed_on_as_it_is() -> None:
    parser = AnswerParser()
    assert parser.feed(" <think> <tool_call>{} \n") == [Content(" <think> <tool_call>{} \n")]
    assert parser.finish() == []


def test_special_tokens_leave_nothing_and_further_calls_are_dropped() -> None:
    text = '<|pad|>a<|pa<tool_call>{"name": "x"}</tool_call><tool_call>{"name": "y"}</tool_call>b<|pad|>'
    for pieces in ([text], list(text)):
        parser = AnswerParser(TOOL_PARSERS.load("hermes")({}), max_calls=1, dropped=["<|pad|>"])
        message = ChatMessage().extend([e for piece in pieces for e in parser.feed(piece)] + parser.finish())
        assert plain(message) == ("a<|pab", "", [("x", "{}")])
