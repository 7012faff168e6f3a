"""Python literals in tool calls, turned to JSON text while they arrive. Nothing is evaluated.

Source: the Python Language Reference, "Lexical analysis". Also read: JSON's true, false and null,
and line breaks within quotes. Sets and tuples become lists. Malformed: bytes, complex and infinite
numbers, f-strings with expressions.
"""

import math
import re
import unicodedata
from collections.abc import Callable

from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.values import (
    CONSTANTS,
    HEX_DIGITS,
    MAX_DEPTH,
    MAX_WORD,
    NUMBER,
    Emit,
    escaped,
    hex_character,
)

_WORD = re.compile(r"[\w.+-]*")
_FLOAT = re.compile("[.eE]")
_MAX_SIGNS = 16
_SIMPLE = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip
_OCTAL = "01234567"
_MAX_CHARACTER_NAME = 128
_PREFIXES = {"", "r", "u", "f", "rf", "fr"}
_STRING = re.compile("[rufRUF]{0,2}['\"]")
_PREFIX = re.compile("[rufRUF]{0,2}")


def read_literal(scanner: Scanner, emit: Emit, depth: int = 0) -> Step[None]:
    """Reads one literal and emits its JSON text in pieces.

    Raises:
        Malformed: no literal that JSON can hold, or nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise Malformed
    if (yield from scanner.accept("{")):
        yield from _braces(scanner, emit, depth)
    elif (yield from scanner.accept("[")):
        emit("[")
        yield from _entries(scanner, emit, "]", lambda: read_literal(scanner, emit, depth + 1))
        emit("]")
    elif (yield from scanner.accept("(")):
        yield from _parentheses(scanner, emit, depth)
    else:
        yield from _scalar(scanner, emit)


def _entries(
    scanner: Scanner, emit: Emit, close: str, read: Callable[[], Step[None]], begun: bool = False
) -> Step[None]:
    """Ends at the bracket `close`. `begun`: one was read already."""
    while True:
        yield from scanner.space()
        comma = begun and (yield from scanner.accept(","))
        yield from scanner.space()
        if (yield from scanner.accept(close)):
            return
        if begun and not comma:
            raise Malformed
        if begun:
            emit(", ")
        yield from read()
        begun = True


def _parentheses(scanner: Scanner, emit: Emit, depth: int) -> Step[None]:
    yield from scanner.space()
    if (yield from scanner.accept(")")):
        emit("[]")
        return
    first = list[str]()
    yield from read_literal(scanner, first.append, depth + 1)
    yield from scanner.space()
    if (yield from scanner.accept(")")):
        emit("".join(first))
        return
    if (yield from scanner.peek()) != ",":
        raise Malformed
    emit("[" + "".join(first))
    yield from _entries(scanner, emit, ")", lambda: read_literal(scanner, emit, depth + 1), begun=True)
    emit("]")


def _braces(scanner: Scanner, emit: Emit, depth: int) -> Step[None]:
    """A colon after the first entry tells a dict from a set. Some models double a dict's braces."""
    doubled = yield from scanner.accept("{")
    yield from scanner.space()
    if (yield from scanner.accept("}")):
        emit("{}")
    else:
        first = list[str]()
        yield from read_literal(scanner, first.append, depth + 1)
        yield from scanner.space()
        if (yield from scanner.accept(":")):
            emit("{" + _key("".join(first)) + ": ")
            yield from scanner.space()
            yield from read_literal(scanner, emit, depth + 1)
            yield from _entries(scanner, emit, "}", lambda: _pair(scanner, emit, depth + 1), begun=True)
            emit("}")
        elif (yield from scanner.peek()) not in (",", "}"):
            raise Malformed
        else:
            emit("[" + "".join(first))
            yield from _entries(scanner, emit, "}", lambda: read_literal(scanner, emit, depth + 1), begun=True)
            emit("]")
    if doubled:
        yield from scanner.accept("}")


def _pair(scanner: Scanner, emit: Emit, depth: int) -> Step[None]:
    key = list[str]()
    yield from read_literal(scanner, key.append, depth)
    yield from scanner.space()
    yield from scanner.expect(":")
    emit(_key("".join(key)) + ": ")
    yield from scanner.space()
    yield from read_literal(scanner, emit, depth)


def _key(text: str) -> str:
    if text[0] in "[{":
        raise Malformed(text)
    return text if text[0] == '"' else f'"{text}"'


def _scalar(scanner: Scanner, emit: Emit) -> Step[None]:
    signs = ""
    while sign := (yield from scanner.accept("+", "-")):
        signs += sign
        yield from scanner.space()
        if len(signs) > _MAX_SIGNS:
            raise Malformed(signs)
    word = yield from scanner.run(_WORD, MAX_WORD)
    if not signs and word.lower() in _PREFIXES and (yield from scanner.peek()) in ("'", '"'):
        yield from _strings(scanner, emit, word)
    elif not signs and word in CONSTANTS:
        emit(CONSTANTS[word])
    elif scanner.truncated and not scanner.num_ready:
        raise Malformed(signs + word)  # more digits may follow, as in 0x1F
    else:
        emit(_number(signs, word))


def _number(signs: str, word: str) -> str:
    """Refuses what is too large for a float: readers of JSON take it for infinite."""
    sign = "-" if signs.count("-") % 2 else ""
    value = _as_number(word) if word[:1].isdigit() or word[:1] == "." else None
    if value is None:
        raise Malformed(signs + word)
    return sign + (word if NUMBER.fullmatch(word) else repr(value))


def _as_number(word: str) -> int | float | None:
    try:
        value = float(word) if _FLOAT.search(word) and word[:2].lower() != "0x" else int(word, 0)
        return value if math.isfinite(value) else None
    except (ValueError, OverflowError):
        return None


def _strings(scanner: Scanner, emit: Emit, prefix: str) -> Step[None]:
    emit('"')
    while True:
        yield from _string(scanner, emit, prefix.lower())
        yield from scanner.space()
        follows = yield from scanner.ahead(3, _string_follows)
        if follows is None and scanner.truncated:
            raise Malformed
        if not follows:
            break
        prefix = yield from scanner.run(_PREFIX)
        if prefix.lower() not in _PREFIXES:
            raise Malformed(prefix)
    emit('"')


def _string_follows(text: str, whole: bool) -> bool | None:
    if _STRING.match(text):
        return True
    return None if not whole and _PREFIX.fullmatch(text) else False


def _string(scanner: Scanner, emit: Emit, prefix: str) -> Step[None]:
    quote = yield from scanner.peek()
    opened = yield from scanner.expect(3 * quote, quote)
    formatted = "f" in prefix
    plain = re.compile(rf"[^{quote}\\{'{}' if formatted else ''}]*")
    while True:
        yield from scanner.pass_on(plain, lambda text: emit(escaped(text)))
        letter = yield from scanner.take_chars()
        if letter == quote:
            if len(opened) == 1 or (yield from scanner.accept(2 * quote)):
                return
            emit(escaped(quote))
        elif letter != "\\":  # in an f-string two braces are one
            yield from scanner.expect(letter)
            emit(letter)
        elif "r" in prefix:
            emit(escaped("\\" + (yield from scanner.take_chars())))
        else:
            emit((yield from _escape(scanner)))


def _escape(scanner: Scanner) -> Step[str]:
    """An unknown escape keeps its backslash."""
    letter = yield from scanner.take_chars()
    if letter in _SIMPLE:
        return escaped(_SIMPLE[letter])
    if letter in HEX_DIGITS:
        return (yield from hex_character(scanner, letter))
    if letter in _OCTAL:
        while len(letter) < 3 and (digit := (yield from scanner.peek())) and digit in _OCTAL:
            letter += yield from scanner.take_chars()
        return escaped(chr(int(letter, 8)))
    if letter == "N":
        yield from scanner.expect("{")
        name = yield from scanner.name("}", _MAX_CHARACTER_NAME)
        try:
            return escaped(unicodedata.lookup(name))
        except KeyError:
            raise Malformed(f"\\N{{{name}}}") from None
    return escaped("\\" + letter)
