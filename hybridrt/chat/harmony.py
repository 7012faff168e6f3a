"""Reads answers in OpenAI's Harmony format: messages, each with a header that names its channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

"analysis" is reasoning. A message to a function is a call. All else is content, of which a blank
line divides two messages. The prompt ends with `<|start|>assistant`.
"""

import re

from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.events import Content, Reasoning
from hybridrt.chat.reasoning import CHANNEL, END, MESSAGE, START
from hybridrt.chat.scanner import Step
from hybridrt.chat.tool_parsers.harmony import Harmony

_ENDS = (END, "<|return|>", "<|call|>", START)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
Kind = type[Content] | type[Reasoning]


class HarmonyParser(AnswerParser):
    """`AnswerParser` of this format. In content, calls of another format may open a section."""

    def _run(self, in_reasoning: bool) -> Step[None]:
        self._started = False  # the literal that begins a header was read
        self._written = set[Kind]()
        if in_reasoning:
            yield from self._message(Reasoning)
        while (header := (yield from self._header())) is not None:
            channel = _CHANNEL.search(header)
            if isinstance(self._tools, Harmony) and "to=functions." in header:
                yield from self._section(self._tools, header)
            else:
                yield from self._message(Reasoning if channel and channel[1] == "analysis" else Content)
        if self._held and not self.num_calls:
            self._sink.events.append(Content("".join(self._held)))

    def _header(self) -> Step[str | None]:
        """The next message's header, through its end; "" before text without one; None at the end
        of the answer. A header that does not end is content."""
        scanner, pieces = self._scanner, list[str]()
        while True:
            opened = START if self._started else (yield from scanner.accept(START, CHANNEL, " to=", "to="))
            if not opened:
                return "" if (yield from scanner.peek()) else None
            pieces = [opened]
            found = yield from scanner.until((MESSAGE, *_ENDS), pieces.append)
            self._started = found == START
            if found == MESSAGE:
                return "".join((*pieces, found))
            if found or not scanner.truncated:
                self._content("".join(pieces))

    def _message(self, kind: Kind) -> Step[None]:
        """Reads a message's text, through the literal that ends it."""
        self.in_reasoning = kind is Reasoning
        emit = self._think if kind is Reasoning else self._content
        opens = () if self._tools is None or isinstance(self._tools, Harmony) else self._tools.opens
        if kind in self._written:
            self._emit(kind, "\n\n", hold=True)
        self._written.add(kind)
        while (found := (yield from self._until((*_ENDS, *opens), emit))) in opens and self._tools is not None:
            yield from self._section(self._tools, found)
        if found or kind is Reasoning:  # white space at the end of a message
            self._held.clear()
        self._started = found == START
        self.in_reasoning = kind is Reasoning and not found
