"""Choices of a launch: tiles, warps, stages, or which of two implementations runs.

A launch has a built-in table: a function of its shape. `hybridrt tune` measures its candidates on a GPU and stores the
best. A choice depends on the shape and the device alone, so a graph's replay and an eager call get the same bits. It is
looked up once for each shape and kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from hybridrt.base.errors import ConfigError

S = TypeVar("S", bound=tuple[Any, ...])
C = TypeVar("C")
Values = Mapping[str, int]  # a choice as it is stored
Tuned = Mapping[str, Mapping[tuple[Any, ...], Values]]  # by the launch's name, then by shape

LAUNCHES: dict[str, "LaunchChoice[Any, Any]"] = {}
_tuned: dict[torch.device, Tuned] = {}


class LaunchChoice(Generic[S, C]):
    """A launch whose choice is looked up by shape.

    Args:
        name: unique, as in files of tuned choices.
        shape: a NamedTuple of integers, booleans and dtypes; all that a choice may depend on.
        built_in: the choice without a measurement, for a shape and a device.
        candidates: choices worth measuring. No other one is taken from a file.
        make: what the launcher gets, made of the choice's values.
    """

    def __init__(
        self, name: str, shape: type[S], built_in: Callable[[S, torch.device], Values],
        candidates: Callable[[S, torch.device], Sequence[Values]], make: Callable[..., C],
    ) -> None:  # fmt: skip
        if name in LAUNCHES:
            raise ConfigError(f"a launch {name!r} exists; names of launches are unique")
        self.name, self.shape, self.built_in, self.candidates, self._make = name, shape, built_in, candidates, make
        self._found: dict[tuple[S, torch.device], C] = {}
        LAUNCHES[name] = self

    def __call__(self, shape: S, device: torch.device) -> C:
        """The choice for a shape on a device: the tuned one, else the built-in one."""
        found = self._found.get((shape, device))
        if found is None:
            tuned = _tuned.get(device, {}).get(self.name, {}).get(shape)
            found = self._found[shape, device] = self._make(
                **(self.built_in(shape, device) if tuned is None else tuned)
            )
        return found

    def seen(self, device: torch.device) -> list[S]:
        """Shapes that were looked up for a device, in this order."""
        return [shape for shape, of in self._found if of == device]

    @contextmanager
    def trying(self, shape: S, device: torch.device, values: Values) -> Iterator[None]:
        """Within it the choice for a shape is this one. For measurements: nothing else may launch meanwhile."""
        key = shape, device
        before, self._found[key] = self._found.get(key), self._make(**values)
        try:
            yield
        finally:
            del self._found[key]
            if before is not None:
                self._found[key] = before

    def forget(self, device: torch.device) -> None:
        """Looks choices of a device up again."""
        for key in [key for key in self._found if key[1] == device]:
            del self._found[key]


def use_tuned(device: torch.device, choices: Tuned) -> None:
    """Launches on this device use these choices from now on. Called before anything runs there."""
    _tuned[device] = choices
    for launch in LAUNCHES.values():
        launch.forget(device)


def tuned_for(device: torch.device) -> Tuned | None:
    """The choices that `use_tuned` got; None before its first call."""
    return _tuned.get(device)


def token_bucket(tokens: int, least: int, most: int) -> int:
    """The next power of two, between bounds that are powers of two."""
    return min(max(1 << max(tokens - 1, 0).bit_length(), least), most)


def unique(choices: Sequence[Values]) -> list[Values]:
    """Each choice once, in their order."""
    return list({tuple(sorted(choice.items())): choice for choice in choices}.values())
