"""Measures the candidates of a launch in turns, and decides.

A candidate may win if its error against the plain implementation is no larger than that of the built-in choice, up to
SLACK, and if two runs give the same bits. It must be faster than the built-in choice by MARGIN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from hybridrt.kernels.core.launch_choice import LaunchChoice, Values
from hybridrt.runtime.tune.trial import Call, MakeTrial, Trial, error_of, same_bits

MARGIN = 0.03
TURNS, FIRST_TURNS, FINALISTS = 9, 2, 4
SLACK = 1.1  # of the built-in choice's error
# Errors that are allowed in any case, in epsilons of the dtype: ROUNDING for an output of 16 bits; ORDER in float32,
# for another order of sums. ORDER is a tenth of the tolerance of the kernels' tests.
ROUNDING, ORDER = 0.25, 8.0


class Timer(Protocol):
    """Times calls on a device."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        """Runs the calls, and returns a function that runs them again and returns the seconds of one of them."""


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


@dataclass(frozen=True)
class _Candidate:
    values: Values
    time: Callable[[], float]
    same_bits: bool


def measure(
    launch: LaunchChoice[Any, Any], shape: Any, device: torch.device, make: MakeTrial, timer: Timer
) -> Measured:
    """Measures one shape of a launch. Raises what the built-in choice raises."""
    trial, built_in = make(shape, device), launch.built_in(shape, device)
    wanted = trial.reference()
    with launch.trying(shape, device, built_in):
        first = trial.outputs()
        allowed = max(SLACK * error_of(first, wanted), _least_error(shape.dtype))
        base = _Candidate(built_in, timer.prepare(trial.calls), True)
    found, refused, others = [base], list[Refused](), [v for v in launch.candidates(shape, device) if v != built_in]
    for values in others:
        with launch.trying(shape, device, values):
            why, same = _objection(trial, wanted, first, allowed)
            if why is None:
                found.append(_Candidate(values, timer.prepare(trial.calls), same))
            else:
                refused.append(Refused(values, why))
    best, seconds, base_seconds = _race(found)
    return Measured(
        launch.name, shape, built_in, best.values, seconds, base_seconds, best.same_bits, len(others), refused
    )


def _least_error(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) * (ORDER if dtype == torch.float32 else ROUNDING)


def _objection(
    trial: Trial, wanted: Sequence[torch.Tensor], first: Sequence[torch.Tensor], allowed: float
) -> tuple[str | None, bool]:
    """Why the choice that is being tried cannot win, and whether it has the built-in choice's bits."""
    try:
        outputs = trial.outputs()
    except (CompilationError, OutOfResources, PTXASError) as e:
        return f"it does not fit this GPU: {type(e).__name__}", False
    if (error := error_of(outputs, wanted)) > allowed:
        return f"its error is {error:.1e}, and {allowed:.1e} is allowed", False
    if not same_bits(outputs, trial.outputs()):
        return "two runs gave different bits", False
    return None, same_bits(outputs, first)


def _race(found: Sequence[_Candidate]) -> tuple[_Candidate, float, float]:
    """The winner, its median and that of the first, which is the built-in choice. All run in turns, since clocks and
    temperatures change; after some turns only the fastest go on."""
    times: list[list[float]] = [[] for _ in found]
    racing = list(range(len(found)))
    for turn in range(TURNS if len(found) > 1 else 1):
        if turn == FIRST_TURNS:
            fastest = sorted(racing, key=lambda i: median(times[i]))[:FINALISTS]
            racing = sorted({0, *fastest})
        for i in racing:
            times[i].append(found[i].time())
    base = median(times[0])
    best = min(racing, key=lambda i: median(times[i]))
    if median(times[best]) > (1.0 - MARGIN) * base:
        best = 0
    return found[best], median(times[best]), base
