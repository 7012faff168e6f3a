"""The environment variables of torchrun."""

import os
from dataclasses import dataclass

from hybridrt.base.errors import ConfigError

_ADVICE = "torchrun sets it; unset RANK and WORLD_SIZE to run without torchrun"


@dataclass(frozen=True)
class World:
    """The processes that torchrun started, and this one's place among them.

    Attributes:
        rank, size: among all processes.
        local_rank, local_size: among those of this host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def world() -> World | None:
    """None if torchrun did not start this process.

    Raises:
        ConfigError: a variable is no number, or the numbers contradict each other.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    size = _number("WORLD_SIZE", 1, 2**31)
    rank = _number("RANK", 0, size)
    local_size = _number("LOCAL_WORLD_SIZE", 1, size + 1, default=0)
    return World(rank, size, _number("LOCAL_RANK", 0, local_size or size, default=0), local_size)


def master_host() -> str:
    """Address of rank 0 for the other hosts. ConfigError if MASTER_ADDR is missing."""
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise ConfigError(f"MASTER_ADDR is not set; {_ADVICE}")
    return host


def _number(name: str, low: int, end: int, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not low <= number < end:
        raise ConfigError(f"{name} is {text!r}; it must be an integer from {low} to {end - 1}: {_ADVICE}")
    return number
