"""Finds a key that several processes share: given, in a file, or in the environment."""

import os
from pathlib import Path

from hybridrt.base.errors import ConfigError
from hybridrt.base.files import read_text
from hybridrt.channel.auth import check_key

FLEET_VARIABLE = "HYBRIDRT_FLEET_KEY"

Key = str | Path


def find_key(key: Key | None, what: str, variable: str) -> str | None:
    """The key as text.

    Args:
        key: the key, or a Path of its file; None: the environment variable, if set.
        what: names the key in errors, such as "transfer key".

    Raises:
        ConfigError: it is too short, or the file cannot be read.
    """
    if key is None:
        key = os.environ.get(variable) or None
    if key is None:
        return None
    if isinstance(key, Path):
        try:
            key = read_text(key, 1 << 16)
        except (OSError, ValueError) as e:
            raise ConfigError(f"the file of the {what} cannot be read: {e}") from e
    if not isinstance(key, str):
        raise ConfigError(f"key is {type(key).__name__}; pass the key as text, or a Path of the file that holds it")
    text = key.strip()
    check_key(f"the {what}", text.encode())
    return text


def find_fleet_key(file: str | None) -> str | None:
    """The key of a router and its replicas. Raises ConfigError as `find_key`."""
    return find_key(None if file is None else Path(file), "fleet key", FLEET_VARIABLE)
