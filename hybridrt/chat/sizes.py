"""Checks the size of a conversation before anything is made of it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hybridrt.base.errors import RequestError
from hybridrt.base.pace import rest

# Limits of a whole conversation. Reading, passing on and rendering take microseconds for each.
MAX_PARTS = 2**15  # parts of all messages' contents
MAX_CALLS = 2**14  # calls of all earlier answers
MAX_KWARGS = 2**10  # values in chat_template_kwargs, on all levels
MAX_KWARGS_CHARACTERS = 2**16
MAX_VALUES = 2**18  # values in messages and tools, on all levels
MAX_CHARACTERS = 2**26
LARGE = 2**16  # characters; longer conversations are processed apart
_NUMBER_CHARACTERS = 16  # a number, boolean or null counts as a text of this length


def check_sizes(messages: Sequence[Any], tools: object, kwargs: object) -> None:
    """
    Raises:
        RequestError: the data of a conversation has too many parts, calls, values or characters.
    """
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    calls = [m.get("tool_calls") for m in messages if isinstance(m, Mapping)]
    _check("content parts", _entries(contents), MAX_PARTS, "messages")
    _check("tool calls", _entries(calls), MAX_CALLS, "messages")
    _check("values in arguments", sum(map(_values_at_most, _arguments(calls))), MAX_VALUES, "messages")
    for name, value in (("messages", messages), ("tools", tools)):
        values, characters = measure(value, MAX_VALUES, MAX_CHARACTERS)
        _check("values", values, MAX_VALUES, name)
        _check("characters", characters, MAX_CHARACTERS, name)
    name = "chat_template_kwargs"
    values, characters = measure(kwargs, MAX_KWARGS, MAX_KWARGS_CHARACTERS)
    _check("values", values, MAX_KWARGS, name)
    _check("characters", characters, MAX_KWARGS_CHARACTERS, name)


def measure(value: object, max_values: int, max_characters: int) -> tuple[int, int]:
    """Values and characters of plain data. Stops above a limit, so numbers are then too low."""
    values = characters = 0
    open_ = [iter((value,))]
    while open_ and values <= max_values and characters <= max_characters:
        rest()
        for each in open_[-1]:
            values += 1
            if isinstance(each, str):
                characters += len(each)
            elif isinstance(each, Mapping):
                open_.append(chain(each.keys(), each.values()))
                values -= len(each)  # a key is no value
                break
            elif isinstance(each, (list, tuple)):
                open_.append(iter(each))
                break
            else:
                characters += _NUMBER_CHARACTERS + (each.bit_length() // 3 if isinstance(each, int) else 0)
            if values > max_values or characters > max_characters:
                break
        else:
            open_.pop()
    return values, characters


def is_large(*data: object) -> bool:
    """Whether plain data is processed apart from small data. Takes no longer for large data."""
    values, characters = measure(data, LARGE // _NUMBER_CHARACTERS, LARGE)
    return values > LARGE // _NUMBER_CHARACTERS or characters > LARGE


def _entries(lists: Sequence[object]) -> int:
    return sum(len(each) for each in lists if isinstance(each, (list, tuple)))


def _arguments(calls: Sequence[object]) -> Iterator[str]:
    for call in chain.from_iterable(each for each in calls if isinstance(each, (list, tuple))):
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            yield arguments


def _values_at_most(text: str) -> int:
    """Bounds their number: reading a value takes as long as hundreds of characters."""
    return 1 + sum(map(text.count, ",[{"))


def _check(what: str, found: int, most: int, field: str) -> None:
    if found > most:
        raise RequestError(f"{field} has more than {most} {what}, which is the limit: send fewer", field)
