"""Measures the candidates of a launch in turns, and decides.

A candidate may win if its error against the plain implementation is no larger than that of the built-in choice, up to
SLACK, and if two runs give the same bits. It must be faster than the built-in choice by MARGIN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from hybridrt.kernels.core.launch_choice import LaunchChoice, Values
from hybridrt.runtime.tune.trial import Call, MakeTrial, error_of, same_bits

MARGIN = 0.03
TURNS, FIRST_TURNS, FINALISTS = 9, 2, 4
SLACK = 1.1  # of the built-in choice's error
# Errors that are allowed in any case, in epsilons of the dtype: ROUNDING for an output of 16 bits; ORDER in float32,
# for another order of sums. ORDER is a tenth of the tolerance of the kernels' tests.
ROUNDING, ORDER = 0.25, 8.0


class ShapeSkippedError(Exception):
    """A shape cannot be measured here: its tensors or its built-in choice do not fit, or the latter fails."""


class BenchLostError(Exception):
    """A candidate has ended the process that ran it, or was not done in time. The bench can be used again."""


class Timer(Protocol):
    """Times calls on a device."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        """Runs the calls, and returns a function that runs them again and returns the seconds of one of them."""


class Check(NamedTuple):
    """`why` a candidate cannot win; None: it can. `same_bits`: it computes the bits of the built-in choice."""

    why: str | None
    same_bits: bool


class Race(NamedTuple):
    """The number of the winner among the choices, its median of seconds, and that of the first choice."""

    winner: int
    seconds: float
    first_seconds: float


class Bench(Protocol):
    """Runs the choices of one launch for one shape."""

    def check(self, values: Values) -> Check:
        """Compares a candidate with the plain implementation. BenchLostError."""

    def race(self, choices: Sequence[Values]) -> Race:
        """Times choices in turns. The first is the built-in one. BenchLostError, ShapeSkippedError."""


class LocalBench:
    """A bench in this process.

    Raises:
        ShapeSkippedError: from its constructor, too.
    """

    def __init__(
        self, launch: LaunchChoice[Any, Any], shape: Any, device: torch.device, make: MakeTrial, timer: Timer
    ) -> None:
        self._launch, self._shape, self._device, self._timer = launch, shape, device, timer
        try:
            self._trial = make(shape, device)
            self._wanted = self._trial.reference()
            with launch.trying(shape, device, launch.built_in(shape, device)):
                self._first = self._trial.outputs()
            error = error_of(self._first, self._wanted)
        except (torch.OutOfMemoryError, OutOfResources) as e:
            raise ShapeSkippedError(str(e).partition(". ")[0]) from e
        self._allowed = max(SLACK * error, _least_error(shape.dtype))

    def check(self, values: Values) -> Check:
        with self._launch.trying(self._shape, self._device, values):
            try:
                outputs = self._trial.outputs()
            except (CompilationError, OutOfResources, PTXASError, torch.OutOfMemoryError) as e:
                return Check(f"it does not fit this GPU: {type(e).__name__}", False)
            if (error := error_of(outputs, self._wanted)) > self._allowed:
                return Check(f"its error is {error:.1e}, and {self._allowed:.1e} is allowed", False)
            if not same_bits(outputs, self._trial.outputs()):
                return Check("two runs gave different bits", False)
            return Check(None, same_bits(outputs, self._first))

    def race(self, choices: Sequence[Values]) -> Race:
        """Since clocks and temperatures change, all run in turns; after some turns only the fastest go on."""
        try:
            runs = [self._prepared(values) for values in choices]
        except torch.OutOfMemoryError as e:
            raise ShapeSkippedError(str(e).partition(". ")[0]) from e
        times: list[list[float]] = [[] for _ in runs]
        racing = list(range(len(runs)))
        for turn in range(TURNS if len(runs) > 1 else 1):
            if turn == FIRST_TURNS:
                fastest = sorted(racing, key=lambda i: median(times[i]))[:FINALISTS]
                racing = sorted({0, *fastest})
            for i in racing:
                times[i].append(runs[i]())
        base, best = median(times[0]), min(racing, key=lambda i: median(times[i]))
        if median(times[best]) > (1.0 - MARGIN) * base:
            best = 0
        return Race(best, median(times[best]), base)

    def _prepared(self, values: Values) -> Callable[[], float]:
        with self._launch.trying(self._shape, self._device, values):
            return self._timer.prepare(self._trial.calls)


def _least_error(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) * (ORDER if dtype == torch.float32 else ROUNDING)


@dataclass(frozen=True)
class Refused:
    """A candidate that cannot win, and why."""

    values: Values
    why: str


@dataclass
class Measured:
    """One shape of a launch.

    Attributes:
        values: the choice: `built_in`, or the candidate that won.
        seconds, built_in_seconds: medians of the two in the same turns.
        same_bits: whether both compute the same bits.
    """

    launch: str
    shape: Any
    built_in: Values
    values: Values
    seconds: float
    built_in_seconds: float
    same_bits: bool = True
    candidates: int = 0
    refused: list[Refused] = field(default_factory=list)

    @property
    def won(self) -> bool:
        """Whether a candidate replaces the built-in choice."""
        return self.values != self.built_in


def measure(launch: LaunchChoice[Any, Any], shape: Any, device: torch.device, bench: Bench) -> Measured:
    """Measures one shape of a launch. ShapeSkippedError if it cannot be measured."""
    built_in = launch.built_in(shape, device)
    others = [values for values in launch.candidates(shape, device) if values != built_in]
    checks = [(values, _checked(bench, values)) for values in others]
    refused = [Refused(values, check.why) for values, check in checks if check.why is not None]
    able = [(values, check.same_bits) for values, check in checks if check.why is None]
    choices = [(built_in, True), *able]
    try:
        race = bench.race([values for values, _ in choices])
    except BenchLostError as e:
        refused += [Refused(values, f"in the race, of which it was one, {e}") for values, _ in able]
        choices, race = choices[:1], bench.race([built_in])
    values, same = choices[race.winner]
    return Measured(launch.name, shape, built_in, values, race.seconds, race.first_seconds, same, len(others), refused)


def _checked(bench: Bench, values: Values) -> Check:
    try:
        return bench.check(values)
    except BenchLostError as e:
        return Check(str(e), False)
