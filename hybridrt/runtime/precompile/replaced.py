"""Replaces attributes of other packages for a while, where they have no seam of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within it the attributes of a module, class or object are these. AttributeError if one is
    missing."""
    found = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in found.items():
            setattr(owner, name, value)
