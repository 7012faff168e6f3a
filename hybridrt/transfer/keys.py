"""Finds the key that all workers of a transfer share."""

import os
from pathlib import Path

from hybridrt.base.errors import ConfigError
from hybridrt.base.files import read_text
from hybridrt.channel.auth import check_key

VARIABLE = "HYBRIDRT_TRANSFER_KEY"

Key = str | Path


def find_key(key: Key | None) -> str | None:
    """The key as text.

    Args:
        key: the key, or a Path of its file; None: the environment variable HYBRIDRT_TRANSFER_KEY,
            if set.

    Raises:
        ConfigError: it is too short, or the file cannot be read.
    """
    if key is None:
        key = os.environ.get(VARIABLE) or None
    if key is None:
        return None
    if isinstance(key, Path):
        try:
            key = read_text(key, 1 << 16)
        except (OSError, ValueError) as e:
            raise ConfigError(f"the file of the transfer key cannot be read: {e}") from e
    if not isinstance(key, str):
        raise ConfigError(f"key is {type(key).__name__}; pass the key as text, or a Path of the file that holds it")
    text = key.strip()
    check_key("the transfer key", text.encode())
    return text
