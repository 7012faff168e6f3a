"""Architectures to families: those that modules of this package hold, or what other packages name in an entry point."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from hybridrt import families
from hybridrt.base.errors import BackendError, UnsupportedModelError
from hybridrt.base.plugins import Plugins
from hybridrt.models.config.family import Family


@cache
def all_families() -> Plugins:
    """The other modules of this package hold a Family for each architecture. Packages add theirs: an entry point of
    this group names a Family, "architecture = module:object"."""
    modules = {m.name for m in iter_modules(families.__path__)} - {"base", "reading", "registry"}
    names = [f"{families.__name__}.{module}" for module in modules]
    held = [(name, of, it) for name in names for of, it in vars(import_module(name)).items() if isinstance(it, Family)]
    places = {family.architecture: f"{name}:{of}" for name, of, family in held}
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
