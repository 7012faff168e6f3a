"""Regular expressions that name modules, matched in bounded time.

A backtracking matcher may take years for an expression of a downloaded file. Here the places in a
name that the expression may have reached are bits of an integer, and a part of the expression moves
all of them at once (Thompson 1968, "Regular expression search algorithm").
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_

from hybridrt.base.errors import ConfigError, shown

LONGEST = 1000  # characters of an expression, and of a name
DEEPEST = 2  # loops within loops: each multiplies the time by the length of the name
_ONE = re.compile(r"\\[dDsSwW]|\[\^?\]?(?:[^\]\\]|\\.)*\]|\.", re.DOTALL)
_ANCHOR = re.compile(r"\\[AZbB]|[$^]")
_LITERAL = re.compile(r"\\[^A-Za-z0-9]|[^\\.\[\]()|*+?^$]", re.DOTALL)
_AROUND = re.compile(r"\(\?(<?)([=!])")
_OPENED = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_REPEATED = re.compile(r"(?:([*+?])|\{(?=[\d,])(\d*)(,?)(\d*)\})(\??)(\+?)")
_RANGES = {"*": (0, None), "+": (1, None), "?": (0, 1)}

_TEXT = re.compile(rf"(?:(?:{_LITERAL.pattern})(?![*+?{{]))+", re.DOTALL)  # none of it is repeated


class _Name:
    """A module's name. size: of the text."""

    def __init__(self, text: str) -> None:
        self.size, self._text = len(text), text
        self._found = dict[re.Pattern[str], int]()

    def places(self, token: re.Pattern[str]) -> int:
        """Where a token matches."""
        if token not in self._found:
            self._found[token] = sum(1 << found.start() for found in token.finditer(self._text))
        return self._found[token]


Move = Callable[[_Name, int], int]  # from places in a name: where one may be after a part


@dataclass(frozen=True)
class _Part:
    """Attributes: depth: loops within each other. token: of a single character, its pattern."""

    move: Move
    depth: int = 0
    token: re.Pattern[str] | None = None


class NamePattern:
    """An expression of Python's syntax, without flags, references to groups and atomic groups, maybe
    after "re:".

    Raises:
        ConfigError: it is none, or may take too long.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise ConfigError(
                f"quantization_config: the expression {shown(text)} has {len(text)} characters; it may have {LONGEST}"
            )
        plain = text.removeprefix("re:")
        try:
            re.compile(plain)  # for its errors
            self._part = _Parser(plain).alternatives()
        except (re.error, RecursionError, OverflowError) as e:
            raise ConfigError(f"quantization_config: {shown(text)} is no regular expression that is read: {e}") from e
        if self._part.depth > DEEPEST:
            raise ConfigError(
                f"quantization_config: the expression {shown(text)} nests repetitions {self._part.depth} deep; it may "
                f"nest {DEEPEST}"
            )

    def match(self, name: str) -> bool:
        """Whether it matches from the start of a name, as `re.match`. ConfigError: the name is too long."""
        if len(name) > LONGEST:
            raise ConfigError(f"the module {shown(name)} has a name of {len(name)} characters; it may have {LONGEST}")
        return self._part.move(_named(name), 1) != 0


class _Parser:
    """Of an expression that `re` has compiled."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def _take(self, token: re.Pattern[str]) -> re.Match[str] | None:
        found = token.match(self._text, self._at)
        self._at = self._at if found is None else found.end()
        return found

    def alternatives(self) -> _Part:
        found = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            found.append(self._sequence())
        moves = [part.move for part in found]
        return _Part(lambda name, at: reduce(or_, (move(name, at) for move in moves)), max(p.depth for p in found))

    def _sequence(self) -> _Part:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))
        moves = [part.move for part in parts]
        return _Part(
            lambda name, at: reduce(lambda found, move: move(name, found), moves, at),
            max((part.depth for part in parts), default=0),
        )

    def _atom(self) -> _Part:
        if token := self._take(_ANCHOR):
            return _anchor(token[0])
        if token := self._take(_TEXT):
            return _text(token[0])
        if token := self._take(_ONE) or self._take(_LITERAL):
            return _character(token[0])
        if token := self._take(_AROUND):
            return self._closed(_behind if token[1] else _ahead, token[2] == "!")
        if token := self._take(_OPENED):
            return self._closed(lambda part, _: part, False)
        raise re.error("it has flags, references or atomic groups", self._text, self._at)

    def _closed(self, made: Callable[[_Part, bool], _Part], negated: bool) -> _Part:
        part = self.alternatives()
        self._at += 1  # the bracket
        return made(part, negated)

    def _repeated(self, part: _Part) -> _Part:
        token = self._take(_REPEATED)
        if token is None:
            return part
        if token[6]:
            raise re.error("it has a possessive repetition", self._text, self._at)
        if token[1]:
            low, high = _RANGES[token[1]]
        else:
            low = int(token[2] or 0)
            high = int(token[4]) if token[4] else None if token[3] else low
        if part.token is not None and high is None and low < 2:
            return _run(part, part.token, low)
        return _loop(part, low, high)


@lru_cache(maxsize=1)
def _named(text: str) -> _Name:
    """Several expressions are tried on a name, one after the other."""
    return _Name(text)


def _anchor(text: str) -> _Part:
    token = re.compile(text)
    return _Part(lambda name, at: at and at & name.places(token))


def _character(text: str) -> _Part:
    token = re.compile(text)
    return _Part(lambda name, at: at and (at & name.places(token)) << 1, token=token)


def _text(text: str) -> _Part:
    token, width = re.compile(f"(?={text})"), len(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL))
    return _Part(lambda name, at: at and (at & name.places(token)) << width)


def _run(part: _Part, token: re.Pattern[str], low: int) -> _Part:
    """Any number of one character: a carry runs through its places."""

    def move(name: _Name, at: int) -> int:
        at, fits = part.move(name, at) if low else at, name.places(token)
        return at | (((at & fits) + fits) ^ fits)

    return _Part(move)


def _loop(part: _Part, low: int, high: int | None) -> _Part:
    """After as many repetitions as there are places, one more changes nothing: one stood still."""

    def move(name: _Name, at: int) -> int:
        most = name.size + 1
        for _ in range(min(low, most)):
            at = part.move(name, at)
        for _ in range(most if high is None else min(high - low, most)):
            grown = at | part.move(name, at)
            if grown == at:
                break
            at = grown
        return at

    return _Part(move, part.depth + (high is None or high > 1))


def _behind(part: _Part, negated: bool) -> _Part:
    def move(name: _Name, at: int) -> int:
        ends = part.move(name, (2 << name.size) - 1)
        return at & ~ends if negated else at & ends

    return _Part(move, part.depth)


def _ahead(part: _Part, negated: bool) -> _Part:
    def move(name: _Name, at: int) -> int:
        each = (1 << place for place in range(name.size + 1) if at >> place & 1)
        return sum(one for one in each if bool(part.move(name, one)) != negated)

    return _Part(move, part.depth + 1)
