"""Names of a package that are imported when they are first used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, for names of packages that import it.

    Args:
        places: "module:name" by name.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, found = places[name].partition(":")
        return getattr(importlib.import_module(module), found)

    return find
