"""Imports that wait: a process in which no test uses a large library does not load it."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any


class Waiting(ModuleType):
    """Stands for a module that is loaded when one of its public names is first used. Others are not looked for: pytest
    asks every global of a test module for some of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazily(name: str) -> ModuleType:
    """ModuleNotFoundError where there is no such module."""
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    return Waiting(name)
