"""Long sweeps over parameters: some of the values belong to the default level, the others are slow."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings


def sweep(values: Iterable[Any], every: int, most: int | None = None, thin: int | None = None) -> list[Any]:
    """`values` for `parametrize`, of which each `every`-th runs by default, the first among them. The others are slow;
    those after the first `most` values, which repeat these with other seeds, are left to the soak level. Of the others
    the slow level takes each second one, the second value among them, or of a long list each `thin`-th: `thin` has no
    divisor in common with the number of values of an inner loop, so that each of them stays."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    usual, more = packed[:most], packed[most:] if most else []
    slow = [i % 2 == 1 if thin is None else i % thin == 0 for i in range(len(usual))]
    levels = [[] if i % every == 0 else [pytest.mark.slow if slow[i] else pytest.mark.soak] for i in range(len(usual))]
    found = [pytest.param(*each, marks=levels[i]) for i, each in enumerate(usual)]
    return found + [pytest.param(*each, marks=pytest.mark.soak) for each in more]


def drawn(values: Iterable[Any], every: int, quick: int, most: int, soak: int = 0, thin: int = 1) -> list[Any]:
    """A sweep of a test that draws examples, whose number is its last parameter: each `every`-th value draws `quick` by
    default, each value `most` in the slow level, and `soak` in the soak level, or five times the greater of both.
    Examples are the same ones each time, so the slow level leaves out what the default level draws as many of. Of the
    others it has each `thin`-th."""
    packed = [value if isinstance(value, tuple) else (value,) for value in values]
    some = [pytest.param(*each, quick) for each in packed[::every]]
    slow = [each for i, each in enumerate(packed) if most > quick or i % every][::thin]
    more = [(slow, most, pytest.mark.slow), (packed, soak or 5 * max(quick, most), pytest.mark.soak)]
    return some + [pytest.param(*each, count, marks=mark) for these, count, mark in more for each in these]


def examples(quick: int, most: int) -> pytest.MarkDecorator:
    """A test that draws `quick` examples by default, a quarter of `most` in the slow level, and `most` in the soak
    level. It gets `examples`, for `draw`."""
    more = [pytest.param(most // 4, marks=pytest.mark.slow), pytest.param(most, marks=pytest.mark.soak)]
    return pytest.mark.parametrize("examples", [quick, *more])


def draw(examples: int, check: Callable[..., None], *strategies: Any, **more: Any) -> None:
    """Calls `check` with so many examples; `more` settings of hypothesis."""
    settings(max_examples=examples, deadline=None, **more)(given(*strategies)(check))()
