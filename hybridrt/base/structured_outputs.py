"""The form that an output must have: JSON schema, regular expression, choice or grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrt.base.errors import RequestError, is_text, shown
from hybridrt.base.errors_foreign import knows_fields

# Characters of a schema, an expression or a grammar, and of all choices together. Reading, writing
# and searching such a text holds up the other threads for less than 3 ms each time.
MAX_CHARACTERS = 2**17
MAX_CHOICES = 4096
# A model may write nothing else without a limit.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_FIELD = "structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Thinking:
    """Reasoning before an output, between tags that are tokens.

    Attributes:
        opens: tokens that start it, as the output's first token; (): the prompt has started it.
        closes: tokens that end it. The output's grammar reads them as its first token.
        budget: tokens of reasoning after which it is ended; None: no limit.
    """

    opens: tuple[int, ...]
    closes: tuple[int, ...]
    budget: int | None = None


@knows_fields({"json_schema": "json", "pattern": "regex", "choices": "choice", "ebnf": "grammar"})
@dataclass(frozen=True)
class StructuredOutputs:
    """The form that an output must have. Exactly one field is set. Equal objects are compiled once.

    Whether a model can use it is known when the request meets the model (`Engine.prepare`).

    Args:
        json: a JSON schema: an object, a bool, or the text of either; kept as text. The output's
            properties come in the schema's order.
        regex: a regular expression in Rust's syntax for the whole output: no look-around, no
            references to groups.
        choice: the output is one of these strings, 1 to MAX_CHOICES (4096).
        grammar: a grammar in llguidance's variant of Lark; its rule `start` is the output.
        thinking: the output may begin with reasoning. Chats set it.

    Raises:
        RequestError: not exactly one field is set, one has the wrong type, or it has more than
            MAX_CHARACTERS (2**17) characters.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _refused(f"has {' and '.join(given) or 'no field'}; set one of {', '.join(_KINDS)}")
        kind = given[0]
        value = {"json": _schema, "choice": _choices}.get(kind, _text)(kind, getattr(self, kind))
        object.__setattr__(self, kind, value)
        length = sum(map(len, value)) if kind == "choice" else len(value)
        if length > MAX_CHARACTERS:
            raise _refused(f"has {length} characters in {kind}; at most {MAX_CHARACTERS} are taken: make it smaller")

    @property
    def kind(self) -> str:
        """Which field is set."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def schema(self) -> dict[str, Any]:
        """`json` as an object, as llguidance needs it: true is {}, false is an empty enumeration."""
        assert isinstance(self.json, str), "a schema is kept as text"
        schema = json.loads(self.json)
        return schema if isinstance(schema, dict) else {} if schema else {"enum": []}


def _refused(problem: str) -> RequestError:
    return RequestError(f"{_FIELD} {problem}", _FIELD)


def _text(kind: str, value: object) -> str:
    if not isinstance(value, str) or not value or not is_text(value):
        raise _refused(f"has {kind}={shown(value)}; it must be text, and not empty")
    return value


def _choices(kind: str, value: object) -> tuple[str, ...]:
    choices = tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else ()
    if not 0 < len(choices) <= MAX_CHOICES:
        raise _refused(f"has {kind}={shown(value)}; it must be a list of 1 to {MAX_CHOICES} strings")
    return tuple(_text(kind, choice) for choice in choices)


def _schema(kind: str, value: object) -> str:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise _refused(f"has {len(value)} characters in {kind}; at most {MAX_CHARACTERS} are taken: make it smaller")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, (Mapping, bool)):
            raise _refused(f"has {kind}={shown(value)}; a JSON schema is an object, true or false")
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as e:
        if isinstance(e, RequestError):
            raise
        raise _refused(f"has {kind}={shown(value)}, which is no JSON ({type(e).__name__}: {e}); repair it") from e
    return _text(kind, text)
