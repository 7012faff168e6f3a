"""Values between tags, shared by formats like XML.

Nothing is escaped in a value, so it may hold the format's own tags: a tag ends the value only if
what follows is allowed next.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial

from hybridrt.chat.scanner import Malformed, Scanner, Step
from hybridrt.chat.schemas import is_of
from hybridrt.chat.values import MAX_NAME, Emit, escaped, read_value

_WINDOW = 512
_INDENT = re.compile(r"[ \t]*")
_NAME_PART = re.compile(r"[^<>\n]*")
_NAME = re.compile(r"[^\s<>=]+")
_QUOTE_OR_ESCAPED = re.compile(r'\\.|"', re.DOTALL)


@dataclass(frozen=True)
class Tags:
    """The tags of a format.

    Attributes:
        close: ends a value.
        opens: begin the next parameter; all but the first are mistakes of models.
        name_close: follows a parameter's name.
        value_open: begins a value; "": it begins after the name.
        ends: end what is around the parameters, the innermost first.
        outer: begin a further call.
        quoted: on a line of its own within a value, begins a quoted call; "": not looked for.
        lines: a value may have lines of its own; a tag then has its own line, with the line break
            before it.
    """

    close: str
    opens: tuple[str, ...]
    name_close: str
    ends: tuple[str, ...]
    outer: tuple[str, ...]
    value_open: str = ""
    quoted: str = ""
    lines: bool = False

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """What a value is read up to."""
        tags = [tag for tag in (self.close, self.opens[0], self.ends[0], self.quoted) if tag]
        return tuple(space + tag for tag in tags for space in (("\n", "") if self.lines else ("",)))

    @cached_property
    def inner(self) -> frozenset[str]:
        """Tags that belong to a parameter: what is before them was within one."""
        return frozenset((self.close, self.opens[0], *self.ends[:-1]))

    @cached_property
    def any_tag(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, (*self.inner, self.ends[-1], *self.outer))))

    @cached_property
    def all_ends(self) -> re.Pattern[str]:
        """The end of a call, with white space; all tags but the last may be missing."""
        inner = "".join(rf"({re.escape(end)}\s*)?" for end in self.ends[:-1])
        return re.compile(rf"\s*{inner}{re.escape(self.ends[-1])}\s*")


def read_name(scanner: Scanner, tags: Tags, known: Collection[str]) -> Step[str]:
    """A parameter's name and the tag after it. "" if there is none; then nothing is read. Only
    known names contain white space."""
    name = yield from scanner.ahead(MAX_NAME + len(tags.name_close), partial(_name, tags))
    if name is None:
        raise Malformed
    if name.strip() not in known and not _NAME.fullmatch(name.strip()):
        return ""
    yield from scanner.take_chars(len(name) + len(tags.name_close))
    return name.strip()


def read_typed(
    scanner: Scanner, tags: Tags, emit: Emit, types: set[str], names: Collection[str] | None = None, block: bool = False
) -> Step[str]:
    """Reads a value and emits its JSON text. Text streams; other values are converted when whole.

    Args:
        types: types that the schema allows. Empty: unknown; the value is an object, a list, or
            text.
        names: parameters that may follow; None: any may.
        block: the value began on a line of its own.

    Returns:
        The tag that ended it, which is read.

    Raises:
        Malformed: the text ended before.
    """
    space = "" if types else (yield from scanner.run(_INDENT))
    if types == {"string"} or (not types and (yield from scanner.peek()) not in ("{", "[")):
        emit('"' + space.replace("\t", "\\t"))
        end = yield from read_text(scanner, tags, lambda text: emit(escaped(text)), names, block)
        emit('"')
        return end
    value = _Collected()
    end = yield from read_text(scanner, tags, value.add, names, block, value.within_string)
    emit(converted(space + "".join(value.pieces), types))
    return end


def read_text(
    scanner: Scanner,
    tags: Tags,
    emit: Emit,
    names: Collection[str] | None,
    block: bool,
    within_string: Callable[[], bool] = lambda: False,
) -> Step[str]:
    """Like `read_typed`, but the value is passed on as it is.

    Args:
        within_string: whether the text so far ends within a JSON string, which contains tags on its
            own line.
    """
    begun, depth = False, 0

    def add(text: str) -> None:
        nonlocal begun
        begun = True
        emit(text)

    while True:
        found = yield from scanner.until(tags.literals, add)
        if not found:
            raise Malformed  # the arguments must not look whole
        tag = found.removeprefix("\n")
        own_line = found != tag or not begun
        if tag == tags.quoted:
            depth += own_line
        elif found != tag or not within_string():
            if (yield from _ends(scanner, tags, tag, own_line or not block, names, depth)):
                return tag
            depth -= depth > 0 and tag == tags.ends[0]
        add(found)


def converted(text: str, types: set[str]) -> str:
    """JSON text of a value: of one of the types if possible, else of a string. Without types an
    object or a list is read as such."""
    found = _python_as_json(text.strip())
    if found is not None:
        value = json.loads(found)
        if any(is_of(value, name) for name in (types or {"object", "array"}) - {"string"}):
            return found
        if "integer" in types and isinstance(value, float) and value.is_integer():
            return str(int(value))
    return f'"{escaped(text)}"'


class _Collected:
    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._checked, self._inside = 0, False  # pieces read, and whether they end in a string

    def add(self, text: str) -> None:
        self.pieces.append(text)

    def within_string(self) -> bool:
        text = "".join(self.pieces[self._checked :])
        if not self._checked and text.lstrip()[:1] not in ("{", "["):
            return False
        self._checked = len(self.pieces)
        self._inside ^= _QUOTE_OR_ESCAPED.findall(text).count('"') % 2 == 1
        return self._inside


def _ends(scanner: Scanner, tags: Tags, tag: str, firm: bool, names: Collection[str] | None, depth: int) -> Step[bool]:
    """Whether a tag, which was read, ends the value. `firm`: the tag is on a line of its own, or
    the value has no such lines. `depth`: quoted calls that have not ended. With any, only the last
    tags of the answer end the value.
    """
    decide = partial(_is_last, tags) if depth else partial(_follows, tags, tag, firm, names)
    verdict = yield from scanner.ahead(_WINDOW, decide)
    if verdict is not None:
        return verdict
    rest = yield from scanner.peek(_WINDOW)  # all that there is
    if scanner.truncated and not tags.all_ends.match(rest if tag == tags.close else tag + rest):
        raise Malformed
    scanner.cut_off = False
    return scanner.truncated or tag == tags.close or (tag in tags.ends and (firm or tags.ends[-1] in rest))


def _follows(tags: Tags, tag: str, firm: bool, names: Collection[str] | None, text: str, whole: bool) -> bool | None:
    """Whether text is allowed after a tag. None: more is needed."""
    if tag == tags.opens[0]:  # the value's own tag was left out
        return firm and _is_named(tags, text, names, whole, tags.value_open)
    if tag != tags.close:
        return _is_early_end(tags, tag + text, firm, whole)
    rest = text.lstrip()
    if rest.startswith(tags.opens) and firm:
        return True
    if rest.startswith(tags.opens[0]):
        return _is_named(tags, rest[len(tags.opens[0]) :], names, whole)
    if rest.startswith(tags.ends):
        return _is_end(tags, rest, whole)
    return None if not whole and any(each.startswith(rest) for each in (*tags.opens, *tags.ends)) else False


def _is_named(tags: Tags, text: str, names: Collection[str] | None, whole: bool, then: str = "") -> bool | None:
    name = _name(tags, text, whole)
    if name is None:
        return None
    rest = text[len(name + tags.name_close) :].lstrip()
    if name and not rest.startswith(then):
        return None if not whole and then.startswith(rest) else False
    return name.strip() in names if names is not None else bool(_NAME.fullmatch(name.strip()))


def _name(tags: Tags, text: str, whole: bool) -> str | None:
    """Reads up to the tag after a name; "" if another tag comes first."""
    found = _NAME_PART.match(text)
    name = found[0] if found is not None else ""
    rest = text[len(name) :]
    if rest.startswith(tags.name_close):
        return name
    return None if not whole and tags.name_close.startswith(rest) else ""


def _is_end(tags: Tags, text: str, whole: bool) -> bool | None:
    """Whether the call ends here: no further parameter follows."""
    found = tags.any_tag.search(_without_ends(tags, text))
    if found is not None:
        return found[0] not in tags.inner
    return True if whole else None


def _is_early_end(tags: Tags, text: str, firm: bool, whole: bool) -> bool | None:
    """The last value may lack its closing tag."""
    rest = _without_ends(tags, text)
    if tags.lines and (firm or tags.all_ends.match(text)):
        return _is_end(tags, text, whole)
    if rest.startswith(tags.outer):
        return firm
    expected = tags.outer if firm else tags.ends
    return None if not whole and any(each.startswith(rest) for each in expected) else False


def _is_last(tags: Tags, text: str, whole: bool) -> bool | None:
    rest = _without_ends(tags, text)
    return None if not whole and (not rest or any(end.startswith(rest) for end in tags.ends)) else False


def _without_ends(tags: Tags, text: str) -> str:
    text = text.lstrip()
    for end in tags.ends:
        text = text.removeprefix(end).lstrip()
    return text


def _python_as_json(text: str) -> str | None:
    if text.lower() in ("true", "false", "null"):
        return text.lower()
    scanner, pieces = Scanner(), list[str]()
    scanner.add(text)
    scanner.closed = True
    try:
        for _ in read_value(scanner, pieces.append):
            pass
    except Malformed:
        return None
    return None if scanner.num_ready else "".join(pieces)
