"""How lists in a quantisation's configuration name modules."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

from hybridrt.base.errors import ConfigError, shown

# A repeated group that ends with a repetition: matching may take exponential time.
_NESTED = re.compile(r"[+*}]\)[+*{]")
LONGEST = 1000  # characters of an expression


@cache
def expression(text: str) -> re.Pattern[str]:
    """A regular expression of a configuration, maybe after "re:".

    Raises:
        ConfigError: it is none, or may take too long.
    """
    if len(text) > LONGEST or _NESTED.search(text):
        raise ConfigError(f"quantization_config: the expression {shown(text)} nests repetitions or is too long")
    try:
        return re.compile(text.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as e:
        raise ConfigError(f"quantization_config: {shown(text)} is no regular expression: {e}") from e


def by_expression(target: str, name: str) -> bool:
    """Whether a "re:" target matches a module from the start of its name."""
    return target.startswith("re:") and expression(target).match(name) is not None


def listed(entries: Iterable[str], name: str) -> bool:
    """Whether lists of transformers name a module: whole, by its start up to a dot, or by its end."""
    return any(name == each or name.startswith(f"{each}.") or name.endswith(each) for each in entries)


def by_wildcard(entries: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, each) for each in entries)
