# ruff: noqa: E501
"""Calls in reasoning that never ends; grammars of every literal that opens a call; work that is linear."""

from collections.abc import Iterator

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.answer_reader import AnswerReader, TokenTags
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.events import ChatMessage
from hybridrt.chat.reasoning import THINK
from hybridrt.chat.registry import TOOL_PARSERS
from hybridrt.chat.scanner import Scanner
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from tests.support.scripted_llm import END, byte_tokenizer
from tests.support.tool_calls import ARGUMENTS, GLM, HERMES, KIMI, PYTHON, QWEN, TOOLS, objects, read, read_everywhere

ENDINGS = [
    (QWEN, "qwen3_coder"), (HERMES, "hermes"), (GLM, "glm"), (KIMI, "kimi_k2"), (KIMI[len("<|tool_calls_section_begin|>") :], "kimi_k2"),
    (f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>", "lfm2"), (f"<function_calls>{PYTHON}</function_calls>", "olmo"),
    (QWEN[len("<tool_call>\n") :], "qwen3_coder"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "parser"), ENDINGS)
def test_a_call_ends_reasoning_that_no_tag_ends(call: str, parser: str) -> None:
    wanted = [("note", ARGUMENTS)]
    for text, inside in ((f"I keep this.\n\n{call}", True), (f"<think>\nI keep this. {call}\n", False)):
        content, reasoning, calls = read_everywhere(parser, text, inside)
        assert (content, reasoning, objects(calls)) == ("", "I keep this.", wanted)
    draft = f"A draft: {call}\nNo.\n"
    content, reasoning, calls = read_everywhere(parser, f"{draft}</think>\n\nHi {call}", True)
    assert (content, reasoning, objects(calls)) == ("Hi", draft.strip(), wanted)
    assert read_everywhere(parser, f"{draft}</think>Hi", True) == ("Hi", draft.strip(), [])
    content, reasoning, calls = read_everywhere(parser, f"{draft}{call}\n{call}", True)  # the last ones are meant
    assert (content, reasoning, objects(calls)) == ("", draft.strip(), wanted * 2)
    assert read_everywhere(parser, draft, True, truncated=True) == ("", draft.strip(), [])


@pytest.mark.parametrize(
    "text", ["I could write <tool_call> here.", "No <tool_call>{} and <function=f> are", "<tool_call>"]
)
def test_reasoning_that_names_a_tag_stays_reasoning_and_streams(text: str) -> None:
    for parser in ("hermes", "qwen3_coder", "glm"):
        assert read_everywhere(parser, text, True) == ("", text, [])
        answer = AnswerParser(TOOL_PARSERS.load(parser)(TOOLS), THINK, in_reasoning=True)
        shown = ChatMessage().extend(answer.feed(text + " And so on, for long."))
        assert shown.reasoning.startswith(text)


def test_reasoning_that_a_call_ends_is_counted() -> None:
    answer = AnswerParser(TOOL_PARSERS.load("hermes")(TOOLS), THINK, in_reasoning=True)
    reader = AnswerReader(answer, TokenTags(frozenset([1]), frozenset([2])), lambda text: [*text.encode()])
    reader.read(f"I keep this.\n{HERMES}", range(10, 90))
    reader.read("", (), "stop")
    assert (reader.reasoning_tokens, reader.finish_reason) == (len("I keep this."), "tool_calls")


def test_every_literal_that_opens_a_section_is_held_to_strict_schemas() -> None:
    """Else a model that writes another one would write what it likes."""
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer.hf), [tokenizer.hf.convert_tokens_to_ids(END)])
    schema = {"type": "object", "properties": {"text": {"enum": ["x"]}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "note", "strict": True, "parameters": schema}}
    for name in ("qwen3_coder", "kimi_k2", "olmo"):
        kind = TOOL_PARSERS.load(name)
        talk = read_conversation([{"role": "user", "content": "Hi"}], [tool])
        wanted = Chat(tokenizer, tool_parser=name).prompt(talk, SamplingParams()).params.structured_outputs
        assert wanted is not None
        for opened in kind.opens:
            matcher = compiler.matcher(wanted).inner
            text = f"So: {opened}" + "?" * (opened == kind.opens[0])
            taken = all(matcher.consume_token(token) for token in tokenizer.encode_bare(text))
            assert not taken, (name, opened)


LOOKED_AT = 600  # no look goes further without reading what it passes


class CountingScanner(Scanner):
    """Counts the characters that are copied, and those that each look at the text may pass."""

    work = 0

    @property
    def _text(self) -> str:  # type: ignore[override]
        CountingScanner.work += min(LOOKED_AT, max(0, len(self._all) - getattr(self, "_place", 0)))
        return self._all

    @_text.setter
    def _text(self, text: str) -> None:
        CountingScanner.work += len(text)
        self._all = text


def floods() -> Iterator[tuple[str, str, bool | None]]:
    """Parser, the unit of an answer that repeats it, and where the answer begins."""
    texts = ["</parameter>", "\n</parameter>\n", "</function>", "<parameter=name>", "\n<function=x>", " ", "x", "\n"]
    for unit in (*texts, "</parameter></function></tool_call> "):
        yield "qwen3_coder", unit, None
    for unit in ("</arg_value>", "<arg_key>", "</tool_call> ", "<tool_call>"):
        yield "glm", unit, None
    for unit in ("'a' ", "\\", "((", "{{"):
        yield "lfm2", unit, None
    for unit in ("<tool_call>", '<tool_call>{"name": "now"', "<tool_call>\n<function=now>\n</function>", " ", "x"):
        yield "hermes", unit, True
        yield "qwen3_coder", unit, True
    yield "hermes", '<tool_call>{"arguments": {"a": 1', None


@pytest.mark.parametrize(("parser", "unit", "inside"), list(floods()))
def test_the_work_is_linear_in_the_length(
    parser: str, unit: str, inside: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("answer_parser", "drafts", "tool_parsers.tagged_values"):
        monkeypatch.setattr(f"hybridrt.chat.{module}.Scanner", CountingScanner)
    begins = {
        "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=text>\n",
        "glm": "<tool_call>note<arg_key>text</arg_key><arg_value>",
        "lfm2": "<|tool_call_start|>[note(any=",
        "hermes": "",
    }
    counts = []
    for length in (1200, 6000):
        CountingScanner.work = 0
        text = ("" if inside else begins[parser]) + unit * (length // len(unit))
        read(parser, [text[i : i + 4] for i in range(0, len(text), 4)], inside)
        counts.append(CountingScanner.work / len(text))
    assert counts[1] < 1.5 * counts[0] + 50, counts
