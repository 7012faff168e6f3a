"""Events of a streamed answer, and the message that is their sum."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call has begun. `index` counts the answer's calls from 0; `id` is new."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Part of a call's arguments as JSON text. The joined parts are an object, or what the model
    wrote if the call is malformed or cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are complete."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


class GrowingText:
    """A text that grows by pieces. They are joined when it is read: to add each to a string would copy it each time."""

    def __init__(self) -> None:
        self._pieces, self.length = list[str](), 0

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.length += len(piece)

    def read(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class ChatMessage:
    """An answer so far: the sum of its events."""

    def __init__(self) -> None:
        self._content, self._reasoning = GrowingText(), GrowingText()
        self._calls = list[tuple[CallBegin, GrowingText]]()

    @property
    def content(self) -> str:
        """Empty if there is none."""
        return self._content.read()

    @property
    def reasoning(self) -> str:
        """Empty if there is none."""
        return self._reasoning.read()

    @property
    def reasoning_length(self) -> int:
        """Characters of `reasoning`, which is not joined for it."""
        return self._reasoning.length

    @property
    def num_calls(self) -> int:
        """Of `tool_calls`, which are not joined for it."""
        return len(self._calls)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """In the order in which they began."""
        return [ToolCall(begin.id, begin.name, arguments.read()) for begin, arguments in self._calls]

    def extend(self, events: Iterable[Event]) -> "ChatMessage":
        """Adds later events. Returns self."""
        for event in events:
            match event:
                case Content():
                    self._content.add(event.text)
                case Reasoning():
                    self._reasoning.add(event.text)
                case CallBegin():
                    self._calls.append((event, GrowingText()))
                case CallArguments():
                    self._calls[event.index][1].add(event.text)
        return self
