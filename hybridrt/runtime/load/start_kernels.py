"""What compiles the kernels of a start while the model is loaded. The runtime knows no more of it than this."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from hybridrt.base.config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.base.plugins import load_object
from hybridrt.collectives.groups import TPGroup


class StartKernels(Protocol):
    """Compiles kernels next to a start."""

    def begin(self, device: torch.device, path: Path) -> None:
        """The device is known, and the model's directory."""

    def wait_for_start(self) -> None:
        """Returns when the kernels that a start needs are compiled, as far as this rank compiles them."""


# Of a run, and a rank of it: a context around the start.
StartAhead = Callable[[EngineConfig, TPGroup], AbstractContextManager[StartKernels]]


class _LaunchesCompile:
    """Every kernel is compiled when it is first launched."""

    def __init__(self, config: EngineConfig, tp: TPGroup) -> None: ...

    def begin(self, device: torch.device, path: Path) -> None: ...

    def wait_for_start(self) -> None: ...

    def __enter__(self) -> "_LaunchesCompile":
        return self

    def __exit__(self, *_: object) -> None: ...


def start_kernels(ahead: StartAhead | None, config: EngineConfig, tp: TPGroup) -> AbstractContextManager[StartKernels]:
    """The context of a start; with None kernels are compiled when they are first launched."""
    return (ahead or _LaunchesCompile)(config, tp)


def name_of(ahead: StartAhead | None) -> str | None:
    """By which another process finds it (`hybridrt.base.plugins.load_object`); None for none.

    Raises:
        ConfigError: it has no such name.
    """
    if ahead is None:
        return None
    module, name = ahead.__module__, getattr(ahead, "__qualname__", "")
    if module == "__main__" or not name.isidentifier() or load_object(f"{module}:{name}") is not ahead:
        raise ConfigError(f"ahead is {ahead!r}; other ranks find it by name: pass a class or function of a module")
    return f"{module}:{name}"
