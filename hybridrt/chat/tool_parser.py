"""The interface of formats of tool calls, and the sink for calls."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, ClassVar

from hybridrt.chat.events import CallArguments, CallBegin, CallEnd, Event
from hybridrt.chat.scanner import Scanner, Step
from hybridrt.chat.tools import Tool


class CallSink:
    """Where a format reports a call: `begin_call`, `arguments` any number of times, `end_call`.

    Args:
        scanner: its mark is set after each whole call, so that other text can become content.
        max_calls: further calls are read and dropped; None: all are kept.

    Attributes:
        events: reported and not taken yet.
        count: calls that have begun.
        inside: a call has begun and not ended.
        answer: from which ids of calls follow.
    """

    def __init__(self, scanner: Scanner, max_calls: int | None = None) -> None:
        self.events: list[Event] = []
        self.count = 0
        self.inside = False
        self.answer = uuid.uuid4().hex
        self._scanner, self._max_calls = scanner, max_calls

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """A call of the function `name`; None: the call gets a new id."""
        self._scanner.release()
        self.inside = True
        self.count += 1
        self._report(CallBegin(self.count - 1, call_id or self.call_id(self.count - 1), name))

    def call_id(self, index: int) -> str:
        """The id of a call to which the model gives none."""
        return f"call_{sha256(f'{self.answer}/{index}'.encode()).hexdigest()[:24]}"

    def arguments(self, text: str) -> None:
        if text:
            self._report(CallArguments(self.count - 1, text))

    def end_call(self) -> None:
        self.inside = False
        self._scanner.mark()
        self._report(CallEnd(self.count - 1))

    def _report(self, event: Event) -> None:
        if self._max_calls is None or self.count <= self._max_calls:
            self.events.append(event)


class ToolParser(ABC):
    """A format of tool calls. `AnswerParser` finds a section that begins with one of `opens`, and
    calls `read_calls`.

    An instance belongs to one request and keeps no state of an answer.

    Args:
        tools: JSON schema of each function's parameters, by name.

    Attributes:
        opens: each begins a section.
        closes: each ends one. A section may also end without.
        writes_close: a grammar of the format ends a section with the first of `closes`.
        markers: texts that a chat template of this format contains: each text, and one of each
            tuple. The format with the longest markers is chosen.
        tokens: added tokens that only such a model has. They tell the format if the template does
            not.
        alone: an answer holds calls and no text.
    """

    opens: ClassVar[Sequence[str]]
    closes: ClassVar[Sequence[str]] = ()
    writes_close: ClassVar[bool] = True
    markers: ClassVar[Sequence[str | tuple[str, ...]]]
    tokens: ClassVar[Sequence[str]] = ()
    alone: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools

    def section_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> Sequence[str] | None:
        """Lark rules for the text between an opening and a closing literal, the rule `section`
        among them: calls of these tools, strict ones by their schemas. None: the format has no
        rules.

        Args:
            literal: text, or a tag that may be a token, as a rule writes it.
        """
        return None

    @abstractmethod
    def read_calls(self, scanner: Scanner, sink: CallSink, opened: str) -> Step[None]:
        """Reads a section after its opening literal, through the closing one.

        Raises:
            Malformed: it is not in this format. Before a call has begun, its text becomes content;
                within a call, the rest of the section becomes part of the arguments.
        """
