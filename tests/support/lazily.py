"""Imports that wait: a process in which no test uses a large library does not load it."""

import importlib.util
import sys
from types import ModuleType


def lazily(name: str) -> ModuleType:
    """A module that is loaded when one of its names is first used. ModuleNotFoundError where there is none."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module named {name!r}", name=name)
    spec.loader = loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
