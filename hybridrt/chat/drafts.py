"""Holds calls within reasoning until the end of the answer.

A model may write a call within its reasoning as a draft, and go on reasoning. Or it may call, and end
without closing the reasoning. Which of the two it was is known at the end of the answer.
"""

from collections.abc import Callable

from hybridrt.chat.scanner import Malformed, Scanner
from hybridrt.chat.tool_parser import CallSink, ToolParser


class Drafts:
    """Passes reasoning on up to its first call, and holds the rest.

    Args:
        think: takes reasoning.
    """

    def __init__(self, tools: ToolParser, think: Callable[[str], None]) -> None:
        self._tools, self._think = tools, think
        self._held = list[str]()
        self._begun = False  # it may be no call before
        self._start("")

    def _start(self, opened: str) -> None:
        self._scanner = Scanner()
        self._sink = CallSink(self._scanner)
        self._steps = self._tools.read_calls(self._scanner, self._sink, opened)

    def add(self, text: str) -> None:
        """Takes text that opens no call."""
        if self._held:
            self._held.append(text)
            self._try(text)
        else:
            self._think(text)

    def open(self, opened: str) -> None:
        """Takes a literal that may open a call."""
        if self._held:
            self._try(opened)
        if not self._held:
            self._start(opened)
        self._held.append(opened)

    def take_text(self) -> str:
        """Returns the held text, and holds it no longer."""
        held, self._held, self._begun = "".join(self._held), [], False
        return held

    def _try(self, text: str) -> None:
        if self._begun:
            return
        self._scanner.add(text)
        ended = False
        try:
            next(self._steps)
        except (StopIteration, Malformed):
            ended = True
        self._begun = self._sink.count > 0
        if ended and not self._begun:
            self._think(self.take_text())
