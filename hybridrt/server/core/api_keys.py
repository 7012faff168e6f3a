"""API keys, the clients that they stand for, and weights of clients."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrt.base.errors import ConfigError
from hybridrt.base.files import read_text

API_KEY_VARIABLE = "HYBRIDRT_API_KEY"
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
_HEADER_TEXT = re.compile(r"[\x21-\x7e]+")
_CLIENT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FORM = "a line is KEY, or KEY client=NAME weight=NUMBER"


@dataclass(frozen=True)
class ApiKey:
    """A key that requests may bring.

    Args:
        client: who brings it; several keys may name the same client. None: a client of its own.
        weight: the client's share of prompt computation; None: 1, or that of its other keys.

    Raises:
        ConfigError: a field cannot be used.
    """

    key: str = field(repr=False)
    client: str | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        if not _HEADER_TEXT.fullmatch(self.key):
            raise ConfigError("an API key is empty, or holds a space or a character that is not ASCII; choose another")
        if self.client is not None and not _CLIENT.fullmatch(self.client):
            raise ConfigError(f"client {self.client!r} of an API key: use 1 to 64 letters, digits, dots, _ and -")
        if self.weight is not None and not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(f"weight {self.weight:g} of an API key must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")


def client_names(keys: Sequence[ApiKey]) -> list[str]:
    """The client of each key. Names that a key cannot have are those of keys without a client."""
    return [f"key/{i}" if key.client is None else key.client for i, key in enumerate(keys)]


def client_weights(keys: Sequence[ApiKey]) -> dict[str, float]:
    """Weights by client, where keys name one.

    Raises:
        ConfigError: two keys of a client have different weights, or a key has two clients.
    """
    found = dict[str, float]()
    for key, client in zip(keys, client_names(keys), strict=True):
        if key.weight is not None and found.setdefault(client, key.weight) != key.weight:
            raise ConfigError(f"client {client} has the weights {found[client]:g} and {key.weight:g}; give it one")
    if len({key.key for key in keys}) < len(set(keys)):
        raise ConfigError("an API key is there twice, for two clients; remove one of them")
    return found


def read_api_keys(keys: list[str] | None, file: str | None) -> tuple[ApiKey, ...]:
    """API keys of the command line, else lines of a file, else the variable HYBRIDRT_API_KEY.

    Raises:
        ConfigError: both are given; a line is wrong; or the file or the variable holds no key,
            which would leave the server open.
    """
    if keys and file:
        raise ConfigError("API keys are given twice, by themselves and as a file; pass one of the two")
    if file is not None:
        return _read_file(file)
    if not keys and (text := os.environ.get(API_KEY_VARIABLE)) is not None:
        keys = text.split()
        if not keys:
            raise ConfigError(f"the variable {API_KEY_VARIABLE} is set and holds no key; set it to one, or unset it")
    return tuple(map(ApiKey, keys or ()))


def _read_file(file: str) -> tuple[ApiKey, ...]:
    try:
        lines = read_text(file, 1 << 20).splitlines()
    except (OSError, ValueError) as e:
        raise ConfigError(f"the file of API keys, {file}, cannot be read: {e}") from e
    found = [_read_line(file, i, line.split()) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"the file of API keys, {file}, holds none; write one a line")
    return tuple(found)


def _read_line(file: str, number: int, words: list[str]) -> ApiKey:
    """The errors do not show the line: it holds a secret."""
    given = dict(word.partition("=")[::2] for word in words[1:])
    if len(given) < len(words) - 1 or not given.keys() <= {"client", "weight"}:
        raise ConfigError(f"line {number} of the file of API keys, {file}, has other words than its key; {_FORM}")
    try:
        return ApiKey(words[0], given.get("client"), _number(given.get("weight")))
    except ConfigError as e:
        raise ConfigError(f"line {number} of the file of API keys, {file}: {e}") from e


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError as e:
        raise ConfigError(f"its weight is no number; {_FORM}") from e
