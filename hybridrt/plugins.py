"""Open registries: names to objects of this package, and to those that other packages name in entry points."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from hybridrt.errors import BackendError


@dataclass(frozen=True)
class Plugins:
    """A registry. Nothing is imported before it is loaded.

    Attributes:
        group: of entry points; each names an object, "name = module:object".
        built_in: "module:object" by name; an entry point of the same name is not looked at.
    """

    group: str
    built_in: Mapping[str, str]

    def names(self) -> list[str]:
        """Every name that `load` knows."""
        return sorted({*self.built_in, *(point.name for point in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """The object of a name; None if there is no such name. BackendError if it cannot be imported."""
        target = self.built_in.get(name)
        if target is None:
            target = next((point.value for point in entry_points(group=self.group) if point.name == name), None)
        return None if target is None else load_object(target)


def load_object(target: str) -> Any:
    """What "module:name" names. BackendError if it cannot be imported."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise BackendError(f"{target} cannot be imported: {e}; install what it needs, see its extra") from e
