"""Architectures to families: a module of this package each, or what other packages name in an entry point."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from hybridrt import families
from hybridrt.errors import BackendError, UnsupportedModelError
from hybridrt.families.base import Family
from hybridrt.plugins import Plugins


@cache
def all_families() -> Plugins:
    """The other modules of this package each hold one FAMILY. Packages add theirs: an entry point of this group names
    a Family, "architecture = module:object"."""
    modules = {m.name for m in iter_modules(families.__path__)} - {"base", "registry"}
    names = [f"{families.__name__}.{module}" for module in modules]
    places = {import_module(name).FAMILY.architecture: f"{name}:FAMILY" for name in names}
    return Plugins("hybridrt.families", places, "architecture", Family, UnsupportedModelError)


@cache
def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        UnsupportedModelError: there is none.
        BackendError: the package that should bring it cannot be imported, or brings something else.
    """
    family: Family = all_families().load(architecture)
    if family.architecture != architecture:
        raise BackendError(f"the entry point {architecture!r} gives {family!r}; it must name a Family of that name")
    return family
