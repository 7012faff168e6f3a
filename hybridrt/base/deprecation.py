"""Warnings about names that will go, each with the day until which it works."""

import warnings
from dataclasses import dataclass
from datetime import date

from hybridrt.base.errors import ConfigError

MIN_DAYS = 90  # docs/stability.md promises this


@dataclass(frozen=True)
class Deprecation:
    """A public name that still works. ConfigError if it would not last for MIN_DAYS.

    Args:
        name: what users write, such as "LLM(seed=)" or "--seed".
        instead: what they should write.
        since: the day of the release that warns first.
        until: the name works in all releases before this day.
    """

    name: str
    instead: str
    since: date
    until: date

    def __post_init__(self) -> None:
        days = (self.until - self.since).days
        if days < MIN_DAYS:
            raise ConfigError(f"{self.name} would warn for {days} days; it must be {MIN_DAYS} at least")

    def warn(self, stacklevel: int = 2) -> None:
        """Warns the caller of the function that calls this. Python shows a FutureWarning to everybody, once a place."""
        text = f"{self.name} is deprecated since {self.since} and works until {self.until}: use {self.instead}"
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
