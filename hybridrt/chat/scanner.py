"""Reads text in pieces: a parser is a generator that stops when it needs more text.

Methods that may need more text are called with `yield from`. `AnswerParser.feed` adds text and
resumes the parser, so results cannot depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]


class Malformed(Exception):
    """The text is not in the parser's format.

    Args:
        text: what was read and not passed on.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.text = text


class Scanner:
    """The text from the parser's place on.

    Attributes:
        closed: no more text comes.
        cut_off: a parser needed more text after the end.
        truncated: the text was cut, so the beginning of a literal at its end is dropped.
    """

    def __init__(self) -> None:
        self.closed = self.cut_off = self.truncated = False
        self._text = ""
        self._place = 0
        self._dropped = 0  # characters before self._text
        # While a parser may return to a mark: the text from there to self._text, and its place in
        # that. No later piece copies it again.
        self._past: list[str] | None = None
        self._marked = 0

    def add(self, text: str) -> None:
        """Adds text; drops text that was read and is not marked."""
        if self._past is not None:
            self._past.append(self._text[self._marked : self._place])
            self._marked = 0
        self._dropped += self._place
        self._text = self._text[self._place :] + text
        self._place = 0

    def mark(self) -> None:
        """`rewind` will return to this place."""
        self._past, self._marked = [], self._place

    def release(self) -> None:
        """Removes the mark, so that the text after it can be dropped."""
        self._past = None

    def rewind(self) -> None:
        assert self._past is not None, "a place was marked"
        past = "".join(self._past)
        if past:  # else the text from the mark on is still there
            self._dropped -= len(past)
            self._text = past + self._text
        self._place, self._past, self.cut_off = self._marked, None, False

    @property
    def position(self) -> int:
        """Characters that were read since the beginning of all text."""
        return self._dropped + self._place

    def skip_rest(self) -> None:
        """Reads the text that is there."""
        self._place = len(self._text)

    @property
    def num_ready(self) -> int:
        """Characters that are there."""
        return len(self._text) - self._place

    def peek(self, count: int = 1) -> Step[str]:
        """The next `count` characters, which stay; fewer at the end of all text."""
        while self.num_ready < count and not self.closed:
            yield
        self.cut_off |= self.num_ready < count
        return self._text[self._place : self._place + count]

    def take_chars(self, count: int = 1) -> Step[str]:
        """The next `count` characters. Malformed if there are not as many."""
        text = yield from self.peek(count)
        if len(text) < count:
            raise Malformed
        self._place += count
        return text

    def ahead(self, max_chars: int, decide: Callable[[str, bool], T | None]) -> Step[T | None]:
        """The result of `decide` on the next characters, which stay. It gets them, and whether it
        will get no more; None asks for more. None at the end of all text: undecided.

        Args:
            max_chars: limit of what `decide` gets.
        """
        while True:
            text = self._text[self._place : self._place + max_chars]
            found = decide(text, len(text) >= max_chars)
            if found is not None or len(text) >= max_chars:
                return found
            if self.closed:
                self.cut_off = True
                return None
            yield

    def accept(self, *literals: str) -> Step[str]:
        """Reads the first of the literals that comes next; "" if none does."""
        for literal in literals:
            while not self.closed and literal.startswith(text := self._text[self._place : self._place + len(literal)]):
                if text == literal:
                    break
                yield
            if self._text.startswith(literal, self._place):
                self._place += len(literal)
                return literal
        if self.closed and any(literal.startswith(self._text[self._place :]) for literal in literals):
            self.cut_off = True
            self._drop_from(self._place)
        return ""

    def expect(self, *literals: str) -> Step[str]:
        """Like `accept`. Malformed if none of them comes."""
        found = yield from self.accept(*literals)
        if not found:
            raise Malformed
        return found

    def space(self) -> Step[str]:
        return (yield from self.run(_SPACE))

    def run(self, pattern: re.Pattern[str], max_chars: int | None = None) -> Step[str]:
        """The longest run of a pattern that matches character by character, such as r"\\w*". Malformed if it has more
        than `max_chars` characters."""
        pieces = list[str]()

        def add(piece: str) -> None:
            pieces.append(piece)
            if max_chars is not None and sum(map(len, pieces)) > max_chars:
                raise Malformed("".join(pieces))

        yield from self.pass_on(pattern, add)
        return "".join(pieces)

    def pass_on(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Step[None]:
        """Like `run`, but emits each piece as it arrives."""
        while True:
            match = pattern.match(self._text, self._place)
            if match is not None and match[0]:
                self._place = match.end()
                emit(match[0])
            if self.num_ready or self.closed:
                self.cut_off |= not self.num_ready
                return
            yield

    def until(self, literals: Sequence[str], emit: Callable[[str], None]) -> Step[str]:
        """Passes text on up to the first of the literals, and reads that one. An end that may begin
        a literal waits for more.

        Returns:
            The longest literal at its place. "" at the end of all text.
        """
        ordered = sorted(literals, key=len, reverse=True)
        whole = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        while True:
            text = self._text
            match = whole.search(text, self._place)
            end = match.start() if match is not None else len(text)
            held = end if self.closed and not self.truncated else _begins(text, self._place, end, ordered)
            if held > self._place:
                emit(text[self._place : held])
                self._place = held
            if match is not None and held == end and (self.closed or not _may_grow(text, match, ordered)):
                self._place = match.end()
                return match[0]
            if match is None and self.closed:
                self.cut_off = True
                self._drop_from(held)
                return ""
            yield

    def _drop_from(self, place: int) -> None:
        """Cuts truncated text, also for a parser that returns to a mark."""
        if self.truncated:
            self._text = self._text[:place]

    def name(self, end: str, max_chars: int) -> Step[str]:
        """The stripped text before a literal, which is read, too. Malformed if there is none, or
        above `max_chars` characters."""
        pieces = list[str]()

        def add(piece: str) -> None:
            pieces.append(piece)
            if sum(map(len, pieces)) > max_chars:
                raise Malformed("".join(pieces))

        found = yield from self.until((end,), add)
        text = "".join(pieces)
        if not found or not text.strip():
            raise Malformed(text + found)
        return text.strip()


_SPACE = re.compile(r"\s*")


def _begins(text: str, start: int, end: int, literals: Sequence[str]) -> int:
    """Returns `end` if there is none."""
    longest = len(literals[0]) if literals else 0
    firsts = {literal[0] for literal in literals}
    for place in range(max(start, len(text) - longest + 1), end):
        tail = text[place:]
        if text[place] in firsts and any(len(tail) < len(literal) and literal.startswith(tail) for literal in literals):
            return place
    return end


def _may_grow(text: str, match: re.Match[str], literals: Sequence[str]) -> bool:
    tail = text[match.start() :]
    return any(len(tail) < len(literal) and literal.startswith(tail) for literal in literals)
