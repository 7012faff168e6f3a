"""Repairs standard streams that are closed, full, or in a poor encoding."""

import os
import sys
from typing import Any


def open_streams() -> list[str]:
    """Makes the three streams usable. Returns the names of those that were closed.

    A closed stream and its descriptor become the null device. Otherwise the next opened file reuses
    this descriptor and receives library output. Standard output writes "?" for characters that its
    encoding lacks.
    """
    closed = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            closed.append(name)
            _to_null(number)
            stream = open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    stdout: Any = sys.stdout
    stdout.reconfigure(errors="replace")
    return closed


def discard_output() -> None:
    """Drops buffered output, which the interpreter would write at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _to_null(number: int) -> None:
    """Opens the null device as standard descriptor `number`, if that is closed."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
