"""Reads JSON files of a checkpoint, and checks types and bounds of their fields."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrt.base.errors import ConfigError, HybridrtError, shown
from hybridrt.base.files import CONFIG_BYTES, read_text


@dataclass(frozen=True)
class FieldType:
    """The values that a field may have: `holds` tests one, `text` describes them in errors. `elsewhere`: our values
    by those of other runtimes, or advice after "!"."""

    text: str
    holds: Callable[[Any], bool]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def hint(self, value: Any) -> str:
        """Follows an error's text; "" for a value that no other runtime has."""
        ours = self.elsewhere.get(value, "") if isinstance(value, str) else ""
        return f": {ours[1:]}" if ours.startswith("!") else f": write {ours!r}" if ours else ""


def integer(low: int, high: int) -> FieldType:
    """From `low` to `high`; not true or false."""
    return FieldType(f"an integer from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def number(low: float, high: float) -> FieldType:
    """An integer or float from `low` to `high`, not NaN."""
    return FieldType(f"a number from {low:g} to {high:g}", lambda v: type(v) in (int, float) and low <= v <= high)


def one_of(*values: str, elsewhere: Mapping[str, str] | None = None) -> FieldType:
    """`elsewhere`: as a FieldType has it."""
    return FieldType(f"one of {', '.join(values)}", lambda v: isinstance(v, str) and v in values, elsewhere or {})


def list_of(item: FieldType, length: int | None = None) -> FieldType:
    """A list (of `length` items, if given) of `item`."""

    def holds(value: Any) -> bool:
        fits = isinstance(value, (list, tuple)) and length in (None, len(value))
        return fits and all(map(item.holds, value))

    return FieldType(f"a list{'' if length is None else f' of {length}'}, each {item.text}", holds)


def either(first: FieldType, second: FieldType) -> FieldType:
    elsewhere = {**first.elsewhere, **second.elsewhere}
    return FieldType(f"{first.text}, or {second.text}", lambda v: first.holds(v) or second.holds(v), elsewhere)


NULL = FieldType("null", lambda v: v is None)
TRUE = FieldType("true", lambda v: v is True)
FALSE = FieldType("false", lambda v: v is False)
FLAG = FieldType("true or false", lambda v: isinstance(v, bool))
TEXT = FieldType("a string", lambda v: isinstance(v, str))
OBJECT = FieldType("an object", lambda v: isinstance(v, Mapping))


def check_fields(
    source: Any, types: Mapping[str, FieldType], file: Path | str = "", error: type[HybridrtError] = ConfigError
) -> None:
    """Compares fields with their types.

    Args:
        source: an object with an attribute for each field; or a mapping, in which fields may be
            absent.
        file: where the fields come from, for the error's text; "" for arguments.

    Raises:
        error: names the file, the field and the value that has another type or is out of bounds.
    """
    for name, field_type in types.items():
        if isinstance(source, Mapping) and name not in source:
            continue
        value = source[name] if isinstance(source, Mapping) else getattr(source, name, None)
        if not field_type.holds(value):
            where = f"{file}: " if file else ""
            raise error(f"{where}{name} is {shown(value)}; it must be {field_type.text}{field_type.hint(value)}")


def read_object(file: Path, error: type[HybridrtError] = ConfigError, max_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        error: the file cannot be read, has more than `max_bytes`, is not JSON, is nested too
            deeply, or does not contain an object.
    """
    try:
        raw = json.loads(read_text(file, max_bytes), object_hook=_special_float)
    except OSError as e:
        raise error(f"{file} cannot be read: {e.strerror or e}; check that it is a file with read permission") from e
    except (ValueError, RecursionError) as e:
        raise error(f"{file} is not valid JSON: {e}; repair it or download it again") from e
    if not isinstance(raw, dict):
        raise error(f"{file} holds a {type(raw).__name__}; it must be a JSON object")
    return raw


def _special_float(found: dict[str, Any]) -> Any:
    """transformers writes floats that JSON lacks as {"__float__": "Infinity"}."""
    name = found.get("__float__")
    return float(name) if len(found) == 1 and name in ("Infinity", "-Infinity", "NaN") else found
