"""Reads one sample's answer: events, the message so far, and the number of reasoning tokens."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.events import CallArguments, CallBegin, CallEnd, ChatMessage, Content, Event

ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


@dataclass(frozen=True)
class TokenTags:
    """Tokens that begin and end reasoning, by their ids."""

    opens: frozenset[int]
    closes: frozenset[int]


class AnswerReader:
    """Reads the deltas of one sample.

    Args:
        parser: splits the text into reasoning, content and tool calls.
        tags: the single tokens that open and close reasoning, by which its tokens are counted.
             None: reasoning is counted by encoding its text.
        forced: the custom tool whose text is the whole content; the content becomes a call of it.

    Attributes:
        message: the sum of the events so far.
        finish_reason: "tool_calls" if the model stopped after a call; None before the end.
    """

    def __init__(
        self,
        parser: AnswerParser,
        tags: TokenTags | None,
        encode: Callable[[str], list[int]],
        forced: str | None = None,
    ) -> None:
        self.message = ChatMessage()
        self.finish_reason: ChatFinishReason | None = None
        self._parser, self._tags, self._encode, self._forced = parser, tags, encode, forced
        self._counting = parser.in_reasoning
        self._counted = 0
        self._encoded: int | None = None
        self._may_open = not parser.in_reasoning

    def name_calls(self, answer: str) -> None:
        """Makes the ids of calls follow from the answer's id; else they are random. Call it before `read`."""
        self._parser.name_calls(answer)

    def read(
        self, text: str, token_ids: Sequence[int] = (), finish_reason: Literal["stop", "length", "abort"] | None = None
    ) -> list[Event]:
        """What a delta adds. With a finish reason, also what was held back."""
        if self._tags is not None:
            self._count(token_ids, self._tags)
        events = self._parser.feed(text)
        if finish_reason is not None:
            events += self._parser.finish(truncated=finish_reason != "stop")
            called = finish_reason == "stop" and (self._parser.num_calls or self._forced)
            self.finish_reason = "tool_calls" if called else finish_reason
        if self._forced is not None:
            events = [*self._as_call(self._forced, events, finish_reason)]
        self.message.extend(events)
        if finish_reason is not None and self._counting and not self._parser.in_reasoning:
            # A tool call has ended the reasoning without a closing tag, so later tokens were counted too.
            self._counted = len(self._encode(self.message.reasoning))
        return events

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its closing tag included. If tags are no single tokens, 0
        until the end."""
        if self._tags is None and self.finish_reason is not None and self.message.reasoning_length:
            if self._encoded is None:
                self._encoded = len(self._encode(self.message.reasoning))
            return self._encoded
        return self._counted

    @property
    def uncounted(self) -> int:
        """Characters to be encoded at the end to count their tokens."""
        return self.message.reasoning_length if self._tags is None and self._encoded is None else 0

    def _as_call(self, name: str, events: list[Event], finish_reason: str | None) -> Iterator[Event]:
        """The call's arguments are {"input": content}, not closed if the answer was cut off."""
        begun = self.message.num_calls > 0
        for event in [*events, *([Content("")] if finish_reason == "stop" else [])]:
            if not isinstance(event, Content):
                yield event
                continue
            if not begun:
                yield CallBegin(0, self._parser.call_id(0), name)
                yield CallArguments(0, '{"input": "')
                begun = True
            yield CallArguments(0, json.dumps(event.text, ensure_ascii=False)[1:-1])
        if finish_reason is not None and begun:
            if finish_reason == "stop":
                yield CallArguments(0, '"}')
            yield CallEnd(0)

    def _count(self, token_ids: Sequence[int], tags: TokenTags) -> None:
        for token in token_ids:
            if self._may_open and token in tags.opens:
                self._counting, self._may_open = True, False
            self._counted += self._counting
            if self._counting and token in tags.closes:
                self._counting = False
