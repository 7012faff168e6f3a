"""The interface through which kernels are compiled while the model is loaded."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.base.plugins import load_object
from hybridrt.collectives.groups import TPGroup


class StartKernels(Protocol):
    """Compiles kernels next to a start."""

    def start_compiling(self, device: torch.device, path: Path) -> None:
        """Called when the device and the model's directory are known."""

    def wait_for_start(self) -> None:
        """Returns when this rank has compiled the kernels that a start needs."""


StartAhead = Callable[[EngineConfig, TPGroup], AbstractContextManager[StartKernels]]


class _LaunchesCompile:
    def __init__(self, config: EngineConfig, tp: TPGroup) -> None: ...

    def start_compiling(self, device: torch.device, path: Path) -> None: ...

    def wait_for_start(self) -> None: ...

    def __enter__(self) -> "_LaunchesCompile":
        return self

    def __exit__(self, *_: object) -> None: ...


def start_kernels(ahead: StartAhead | None, config: EngineConfig, tp: TPGroup) -> AbstractContextManager[StartKernels]:
    """The context of a start; with None each kernel is compiled at its first launch."""
    return (ahead or _LaunchesCompile)(config, tp)


def name_of(ahead: StartAhead | None) -> str | None:
    """The name for `hybridrt.base.plugins.load_object` in another process; None for none.

    Raises:
        ConfigError: it has no such name.
    """
    if ahead is None:
        return None
    module, name = ahead.__module__, getattr(ahead, "__qualname__", "")
    if module == "__main__" or not name.isidentifier() or load_object(f"{module}:{name}") is not ahead:
        raise ConfigError(f"ahead is {ahead!r}; other ranks find it by name: pass a class or function of a module")
    return f"{module}:{name}"
