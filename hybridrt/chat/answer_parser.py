"""Parses an answer's text into reasoning, content and tool calls, for all formats."""

import re
from collections.abc import Callable, Sequence

from hybridrt.chat.drafts import Drafts
from hybridrt.chat.events import CallArguments, ChatMessage, Content, Event, Reasoning
from hybridrt.chat.reasoning import ReasoningTags
from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.tool_parser import CallSink, ToolParser

_NEWLINES = re.compile(r"\n*")
# Half a character becomes the last one.
_LOOSE = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\N{REPLACEMENT CHARACTER}"


class AnswerParser:
    """Reads one answer: `feed` with each piece of text, then `finish`. The joined events
    (`ChatMessage.extend`) do not depend on the cuts. No text raises an error: what is no tool call
    is content.

    Args:
        tools: format of calls; None: no calls.
        reasoning: format of reasoning; None: no reasoning.
        in_reasoning: the prompt has opened the reasoning.
        max_calls: further calls are dropped; None: all are kept.
        dropped: special tokens that are removed from the content.

    Attributes:
        in_reasoning: the text so far ends within reasoning.
        last_calls: where the last calls begin, those with nothing between them.
        spoken: text followed the last call; without calls, there was text.
    """

    def __init__(
        self,
        tools: ToolParser | None = None,
        reasoning: ReasoningTags | None = None,
        *,
        in_reasoning: bool = False,
        max_calls: int | None = None,
        dropped: Sequence[str] = (),
    ) -> None:
        self._tools, self._reasoning, self._dropped = tools, reasoning, tuple(dropped)
        self._scanner = Scanner()
        self._sink = CallSink(self._scanner, max_calls)
        self._held = list[str]()  # dropped if a call follows (`_emit`)
        self.last_calls: int | None = None
        self.spoken = False
        self._steps = self._run(in_reasoning)
        self.in_reasoning = in_reasoning

    @property
    def num_calls(self) -> int:
        return self._sink.count

    def name_calls(self, answer: str) -> None:
        """Ids of calls follow from the answer's id."""
        self._sink.answer = answer

    def call_id(self, index: int) -> str:
        return self._sink.call_id(index)

    def feed(self, text: str) -> list[Event]:
        """The events that a piece of text adds."""
        if text:
            self._scanner.add(text)
            next(self._steps, None)
        return self._take()

    def finish(self, truncated: bool = False) -> list[Event]:
        """Events of the text that was held back.

        Args:
            truncated: the model would have written more: half a tag or half of a call's syntax is
                dropped, else it is text.
        """
        self._scanner.closed, self._scanner.truncated = True, truncated
        for _ in self._steps:
            pass
        return self._take()

    def _take(self) -> list[Event]:
        events, self._sink.events = self._sink.events, []
        joined = list[Event]()
        for event in events:
            last = joined[-1] if joined else None
            if isinstance(event, Content | Reasoning) and type(last) is type(event):
                joined[-1] = type(event)(last.text + event.text)
            elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
                joined[-1] = CallArguments(event.index, last.text + event.text)
            else:
                joined.append(event)
        return joined

    def _run(self, in_reasoning: bool) -> Step[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning, in_reasoning)
        opens = () if self._tools is None else self._tools.opens
        while opened := (yield from self._until(opens, self._content)):
            if self._tools is not None:
                yield from self._section(self._tools, opened)
        if self._held and not self.num_calls:
            self._sink.events.append(Content("".join(self._held)))

    def _section(self, tools: ToolParser, opened: str) -> Step[None]:
        """Follows the literal `opened`. Text in another format becomes arguments of the begun call,
        else content. At the end of the answer, a begun literal is dropped.
        """
        scanner, sink, before = self._scanner, self._sink, self.num_calls
        place = scanner.position - len(opened)
        scanner.mark()
        try:
            yield from self._read_calls(tools, opened, place)
        except Malformed as e:
            halved = scanner.cut_off and scanner.truncated
            if sink.inside:
                if halved:
                    scanner.skip_rest()
                else:
                    sink.arguments(e.text)
                    yield from self._until(tools.closes, sink.arguments)
                sink.end_call()
            elif halved or (scanner.cut_off and (sink.count > before or tools.alone)):
                scanner.skip_rest()
                self._held.clear()
            else:  # text after the last whole call is content
                scanner.rewind()
                if sink.count == before:
                    self._content(opened)
                else:
                    self._held.clear()
            scanner.release()
            return
        scanner.release()
        self._held.clear()
        yield from scanner.space()
        if not (yield from scanner.accept(*tools.closes)) and scanner.cut_off:
            scanner.skip_rest()

    def _read_calls(self, tools: ToolParser, opened: str, place: int) -> Step[None]:
        before = self.num_calls
        try:
            yield from tools.read_calls(self._scanner, self._sink, opened)
        finally:
            if self.num_calls > before:
                if self.spoken or self.last_calls is None:
                    self.last_calls = place
                self.spoken = False

    def _read_reasoning(self, tags: ReasoningTags, inside: bool) -> Step[None]:
        """Reads these tags at the beginning of an answer alone: later they are text."""
        scanner = self._scanner
        scanner.mark()
        yield from scanner.space()
        opened = yield from scanner.accept(*tags.opens)
        if not opened:
            scanner.rewind()
            if not inside:
                return
        scanner.release()
        self.in_reasoning = True
        yield from scanner.run(_NEWLINES)
        ended = yield from self._reason(tags)
        self._held.clear()
        if ended:
            self.in_reasoning = False
            yield from scanner.run(_NEWLINES)

    def _reason(self, tags: ReasoningTags) -> Step[bool]:
        """Returns whether it ends before the answer. A call ends it if no tag does."""
        if self._tools is None or self._tools.alone:
            return bool((yield from self._until(tags.closes, self._think)))
        drafts = Drafts(self._tools, self._think)
        while found := (yield from self._until((*tags.closes, *self._tools.opens), drafts.add)):
            if found in tags.closes:
                self._think(drafts.take_text())
                return True
            drafts.open(found)
        held, scanner = drafts.take_text(), self._scanner
        last = AnswerParser(self._tools)
        message = ChatMessage().extend(last.feed(held) + last.finish(scanner.truncated))
        if last.last_calls is None:
            self._think(message.content)
            return False
        if scanner.truncated and last.spoken:  # it thinks on: the call is a draft
            self._think(held)
            return False
        self._think(held[: last.last_calls])
        scanner.add(held[last.last_calls :])
        scanner.cut_off = False
        return True

    def _until(self, literals: Sequence[str], emit: Callable[[str], None]) -> Step[str]:
        while found := (yield from self._scanner.until((*literals, *self._dropped), emit)):
            if found in literals:
                break
        return found

    def _think(self, text: str) -> None:
        self._emit(Reasoning, text, hold=True)

    def _content(self, text: str) -> None:
        self._emit(Content, text, hold=self._tools is not None)

    def _emit(self, kind: type[Content] | type[Reasoning], text: str, hold: bool) -> None:
        """Holds white space at the end until more text comes, and half a character: a thinking
        budget may end reasoning there.
        """
        kept = text.rstrip(_LOOSE) if hold else text
        if kept:
            self._sink.events.append(kind("".join((*self._held, kept))))
            self._held.clear()
            self.spoken = True
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
