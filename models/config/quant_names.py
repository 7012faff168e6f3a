"""How lists in a quantisation's configuration name modules."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

from hybridrt.models.config.name_patterns import NamePattern


@cache
def expression(text: str) -> NamePattern:
    """A regular expression of a configuration. ConfigError: it cannot be read."""
    return NamePattern(text)


def by_expression(target: str, name: str) -> bool:
    """Whether a "re:" target matches a module from the start of its name."""
    return target.startswith("re:") and expression(target).match(name)


def listed(entries: Iterable[str], name: str) -> bool:
    """Whether lists of transformers name a module: whole, by its start up to a dot, or by its end."""
    return any(name == each or name.startswith(f"{each}.") or name.endswith(each) for each in entries)


def by_wildcard(entries: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, each) for each in entries)
