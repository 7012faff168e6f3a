"""Events of a streamed answer, and the message that is their sum."""

from collections.abc import Iterable
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class ChatMessage:
    """An answer so far: the sum of its events.

    Attributes:
        content: "" if there is none.
        reasoning: "" if there is none.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def extend(self, events: Iterable[Event]) -> "ChatMessage":
        """Adds later events. Returns self."""
        for event in events:
            match event:
                case Content():
                    self.content += event.text
                case Reasoning():
                    self.reasoning += event.text
                case CallBegin():
                    self.tool_calls.append(ToolCall(event.id, event.name))
                case CallArguments():
                    self.tool_calls[event.index].arguments += event.text
        return self
