"""Keeps torch's compiler out of a process that compiles none of torch's graphs.

Operations on "meta" ask it for `disable`: that imports some 900 modules, a second or more.
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

_NAME = "torch._dynamo"


def leave_out_dynamo() -> None:
    """Replaces the module, unless it is imported, with one that has `disable`. Other names load the
    real one."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _Stand(_NAME)


class _Stand(types.ModuleType):
    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return function

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__file__"):  # names of the import system, which finds a module without them
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
