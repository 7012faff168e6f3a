"""Finds kinds of recurrent layer by name: modules of this package and entry points of others."""

from collections.abc import Iterable
from functools import cache
from pkgutil import iter_modules

import torch

from hybridrt import kinds
from hybridrt.base.errors import BackendError, ConfigError, UnsupportedLayerError
from hybridrt.base.model_config import LinearConfig
from hybridrt.base.plugins import Plugins
from hybridrt.kinds.base import LinearKind, StateShape

# Each module holds its KIND.
_NAMES = {module.name for module in iter_modules(kinds.__path__)} - {"base", "registry"}
# Entry points are "name = module:object" of a LinearKind.
_PLACES = {name: f"hybridrt.kinds.{name}:KIND" for name in _NAMES}
_KINDS = Plugins("hybridrt.kinds", _PLACES, "kind of recurrent layer", LinearKind, UnsupportedLayerError)


def kind_names() -> list[str]:
    """Every name that `linear_kind` accepts."""
    return _KINDS.names()


@cache
def linear_kind(name: str) -> LinearKind:
    """The kind of a name.

    Raises:
        UnsupportedLayerError: there is none of that name.
        BackendError: its package cannot be imported, or brings something else.
    """
    kind: LinearKind = _KINDS.load(name)
    if kind.config.kind != name:
        raise BackendError(f"the entry point {name!r} gives {kind!r}; it must name a LinearKind of that name")
    return kind


def state_shape(config: LinearConfig, tp_size: int = 1) -> StateShape:
    """The state that one layer keeps for one request on one of `tp_size` ranks.

    Heads (channels of Mamba-1) are split. Groups (key heads) are split too; a single one is
    replicated.

    Raises:
        ConfigError: ranks do not divide heads, channels or groups, or the configuration is not one
            of its kind.
    """
    kind = linear_kind(config.kind)
    if not isinstance(config, kind.config):
        raise ConfigError(f"{config!r} configures no {kind.title} layer; use {kind.config.__name__}")
    return kind.shape(config, tp_size)


def state_dtype(shape: StateShape, asked: torch.dtype) -> torch.dtype:
    """dtype of a layer's recurrent state if the run's is `asked`."""
    return linear_kind(shape.kind).state_dtype or asked


def check_replay(names: Iterable[str]) -> None:
    """ConfigError if state mode "replay" does not exist for one of these kinds."""
    if without := [kind.title for kind in map(linear_kind, names) if kind.ring_shapes is None]:
        raise ConfigError(
            f'state mode "replay" does not exist for {", ".join(without)}; use "auto": "classic" without speculation, '
            '"intermediate" with it'
        )


def can_replay(names: Iterable[str]) -> bool:
    """Whether state mode "replay" exists for all of these kinds."""
    return all(linear_kind(name).ring_shapes is not None for name in names)


def replay_pays(names: Iterable[str]) -> bool:
    """Whether state mode "replay" exists for all of these kinds and is faster on a GPU."""
    return can_replay(names) and all(linear_kind(name).replay_pays for name in names)
