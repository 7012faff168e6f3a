"""Values of tool calls, turned to JSON text while they arrive.

Models mix JSON and Python literals: line breaks within strings, single quotes, True and None, a
comma after the last entry, doubled braces.
"""

import json
import math
import re
from collections.abc import Callable

from hybridrt.base.errors import is_text
from hybridrt.chat.scanner import Malformed, Scanner, Step

MAX_DEPTH = 64
MAX_WORD = 512  # characters of a number or a constant
MAX_NAME = 256  # characters of a function's name, or of a format's key
_WORD = re.compile(r"[\w.+-]*")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSES = {"{": "}", "[": "]", "(": "]"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_JSON_ESCAPES = '"\\/bfnrt'
_PYTHON_ESCAPES = {"'": "'", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = re.compile("[0-9a-fA-F]+")
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # by the letter of the escape
Emit = Callable[[str], None]


def escaped(text: str) -> str:
    """Text as the inside of a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_character(code: int) -> str:
    """A character of a JSON string, without quotes. Half a surrogate pair stays an escape."""
    return f"\\u{code:04x}" if code <= 0xFFFF else escaped(chr(code))


def read_value(scanner: Scanner, emit: Emit) -> Step[None]:
    """Reads one value and emits its JSON text in pieces.

    Raises:
        Malformed: it is no value, or is nested deeper than MAX_DEPTH.
    """
    stack: list[str] = []
    while True:
        first = yield from scanner.peek()
        if first and first in _CLOSES:
            yield from _open(scanner, emit, stack)
            if len(stack) > MAX_DEPTH:
                raise Malformed
            if not (yield from _close(scanner, emit, stack)):
                continue
        else:
            yield from _scalar(scanner, emit)
        while stack:
            yield from _space(scanner, emit)
            if not (yield from _close(scanner, emit, stack)) and (yield from _next(scanner, emit, stack)):
                break
        else:
            return


def read_string(scanner: Scanner, emit: Emit) -> Step[None]:
    """Reads a string in either kind of quotes; emits the inside of a JSON string."""
    quote = yield from scanner.take_chars()
    if quote not in _PLAIN:
        raise Malformed
    while True:
        yield from scanner.pass_on(_PLAIN[quote], lambda text: emit(escaped(text)))
        if (yield from scanner.take_chars()) == quote:
            return
        emit((yield from _escape(scanner)))


def read_text(scanner: Scanner, max_chars: int = MAX_NAME) -> Step[str]:
    """A string's text. Malformed above `max_chars` characters, or with a lone surrogate."""
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(piece)
        if sum(map(len, pieces)) > max_chars:
            raise Malformed

    yield from read_string(scanner, add)
    text: str = json.loads(f'"{"".join(pieces)}"')
    if not is_text(text):
        raise Malformed
    return text


def _open(scanner: Scanner, emit: Emit, stack: list[str]) -> Step[None]:
    bracket = yield from scanner.take_chars()
    doubled = bracket == "{" and (yield from scanner.accept("{"))  # no key begins with a brace
    stack.append(2 * _CLOSES[bracket] if doubled else _CLOSES[bracket])
    emit("{" if bracket == "{" else "[")
    yield from _space(scanner, emit)
    if bracket == "{" and (yield from scanner.peek()) != "}":
        yield from _key(scanner, emit)


def _close(scanner: Scanner, emit: Emit, stack: list[str]) -> Step[bool]:
    """Closes tuples as lists."""
    if not _is_close((yield from scanner.peek()), stack[-1]):
        return False
    yield from scanner.take_chars()
    bracket = stack.pop()
    emit(bracket[0])
    yield from scanner.accept(*bracket[1:])  # the rest of a doubled bracket
    return True


def _is_close(after: str, bracket: str) -> bool:
    return after == bracket[0] or (after == ")" and bracket == "]")


def _next(scanner: Scanner, emit: Emit, stack: list[str]) -> Step[bool]:
    """Returns False at the end, also after a comma."""
    yield from scanner.expect(",")
    space = yield from scanner.space()
    after = yield from scanner.peek()
    if _is_close(after, stack[-1]):
        return False
    if not after:
        raise Malformed("," + space)
    emit("," + space)
    if stack[-1][0] == "}":
        yield from _key(scanner, emit)
    return True


def _key(scanner: Scanner, emit: Emit) -> Step[None]:
    yield from _quoted(scanner, emit)
    yield from _space(scanner, emit)
    yield from scanner.expect(":")
    emit(":")
    yield from _space(scanner, emit)


def _quoted(scanner: Scanner, emit: Emit) -> Step[None]:
    if (yield from scanner.peek()) not in _PLAIN:
        raise Malformed
    emit('"')
    yield from read_string(scanner, emit)
    emit('"')


def _scalar(scanner: Scanner, emit: Emit) -> Step[None]:
    if (yield from scanner.peek()) in _PLAIN:
        yield from _quoted(scanner, emit)
        return
    word = yield from scanner.run(_WORD, MAX_WORD)
    if word not in CONSTANTS and not (NUMBER.fullmatch(word) and math.isfinite(float(word))):
        raise Malformed(word)
    emit(CONSTANTS.get(word, word))


def _space(scanner: Scanner, emit: Emit) -> Step[None]:
    space = yield from scanner.space()
    if space:
        emit(space if space.isascii() and not space.strip(" \t\r\n") else " ")


def hex_character(scanner: Scanner, letter: str) -> Step[str]:
    """The character of an escape with HEX_DIGITS, after its letter. Malformed if there is none."""
    digits = yield from scanner.take_chars(HEX_DIGITS[letter])
    code = int(digits, 16) if _HEX.fullmatch(digits) else -1
    if not 0 <= code <= 0x10FFFF:
        raise Malformed("\\" + letter + digits)
    return json_character(code)


def _escape(scanner: Scanner) -> Step[str]:
    """Keeps the backslash of an unknown one, as Python does."""
    letter = yield from scanner.take_chars()
    if letter in HEX_DIGITS:
        return (yield from hex_character(scanner, letter))
    if letter in _JSON_ESCAPES:
        return "\\" + letter
    return escaped(_PYTHON_ESCAPES.get(letter, "\\" + letter))
