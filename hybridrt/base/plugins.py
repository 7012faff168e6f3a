"""Open registries: names to objects of this package, and of entry points of other packages."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from hybridrt.base.errors import BackendError, HybridrtError, shown


@dataclass(frozen=True)
class Plugins:
    """A registry. An object is imported when it is loaded.

    Attributes:
        group: name of a group of entry points "name = module:object".
        built_in: "module:object" by name; comes before an entry point of the same name.
        what: the word for one of the objects in errors, such as "tool parser".
        base: class of the objects; with `classes`, they are subclasses of it.
        unknown: the error for an unknown name.
    """

    group: str
    built_in: Mapping[str, str]
    what: str
    base: type
    unknown: type[HybridrtError] = BackendError
    classes: bool = False

    def names(self) -> list[str]:
        """Every name that `load` accepts."""
        return sorted({*self.built_in, *(point.name for point in entry_points(group=self.group))})

    def place(self, name: str) -> str:
        """The "module:object" of a name. self.unknown: there is none of that name."""
        target = self.built_in.get(name)
        if target is None:
            target = next((point.value for point in entry_points(group=self.group) if point.name == name), None)
        if target is None:
            raise self.unknown(f"{self.what} {shown(name)} is not supported; supported are {', '.join(self.names())}")
        return target

    def load(self, name: str) -> Any:
        """The object of a name.

        Raises:
            self.unknown: there is none of that name.
            BackendError: it cannot be imported, or has the wrong type.
        """
        found = load_object(self.place(name))
        fits = isinstance(found, self.base)
        if self.classes:
            fits = isinstance(found, type) and issubclass(found, self.base)
        if not fits:
            raise BackendError(f"{self.what} {name!r} leads to {found!r}; it must name a {self.base.__name__}")
        return found


def load_object(target: str) -> Any:
    """The object "module:name". BackendError if it cannot be imported."""
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError) as e:  # TypeError: an abstract class
        raise BackendError(f"{target} cannot be imported: {e}; install what it needs, see its extra") from e
