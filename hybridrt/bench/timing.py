"""Times of a benchmark's tokens, and their statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrt.base.errors import ConfigError, ProviderNotInstalledError

PERCENTILES = (50, 90, 95, 99)


@dataclass
class Timing:
    """One request, in seconds since the start of the run.

    Attributes:
        due: when it was to be sent. Times count from here, so a late client does not flatter a
            server.
        gains: when tokens came, and how many.
        error: why it failed.
    """

    due: float
    prompt_tokens: int
    gains: list[tuple[float, int]] = field(default_factory=list)
    end: float = 0.0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        return self.gains[0][0] - self.due

    @property
    def whole(self) -> float:
        return self.end - self.due

    @property
    def between(self) -> list[float]:
        """Seconds between tokens. Tokens that came together share the time since the ones before."""
        distances = []
        for (before, _), (now, count) in zip(self.gains, self.gains[1:]):
            distances += [(now - before) / count] * count
        return distances

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens; 0 for a single one."""
        rest = self.output_tokens - self.gains[0][1]
        return (self.gains[-1][0] - self.gains[0][0]) / rest if rest > 0 else 0.0


@dataclass(frozen=True)
class Goal:
    """Limits for goodput, in seconds; None: no limit."""

    first: float | None = None
    per_token: float | None = None
    whole: float | None = None

    def kept(self, timing: Timing) -> bool:
        """Whether a request kept it."""
        limits = (self.first, timing.first), (self.per_token, timing.per_token), (self.whole, timing.whole)
        return all(limit is None or took <= limit for limit, took in limits)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, interpolated; 0 without values."""
    import numpy as np  # the command line's help needs none

    return float(np.percentile(values, share)) if values else 0.0


def summary(timings: Sequence[Timing], goal: Goal | None = None) -> dict[str, Any]:
    """Counts, rates a second, and times in milliseconds."""
    done = [t for t in timings if t.error is None and t.gains]
    seconds = max((t.end for t in timings), default=0.0)
    kept = sum(goal.kept(t) for t in done) if goal is not None else None

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    return {
        "requests": len(timings),
        "failed": len(timings) - len(done),
        "errors": sorted({t.error for t in timings if t.error is not None})[:5],
        "seconds": seconds,
        "prompt_tokens": sum(t.prompt_tokens for t in done),
        "output_tokens": sum(t.output_tokens for t in done),
        "requests_per_second": rate(len(done)),
        "output_tokens_per_second": rate(sum(t.output_tokens for t in done)),
        "goodput_requests_per_second": None if kept is None else rate(kept),
        "time_to_first_token_ms": _spread([t.first for t in done]),
        "inter_token_latency_ms": _spread([gap for t in done for gap in t.between]),
        "time_per_output_token_ms": _spread([t.per_token for t in done if t.output_tokens > 1]),
        "end_to_end_latency_ms": _spread([t.whole for t in done]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    return {"mean": mean * 1000} | {f"p{p}": percentile(seconds, p) * 1000 for p in PERCENTILES}


def check_picture(file: str) -> None:
    """Checks the file of a picture before the load.

    Raises:
        ProviderNotInstalledError: matplotlib is missing.
        ConfigError: it knows no such format.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as e:
        raise ProviderNotInstalledError(f"a picture needs matplotlib ({e}): pip install '.[plot]'") from e
    known = FigureCanvasBase.get_supported_filetypes()
    if Path(file).suffix.removeprefix(".") not in known:
        raise ConfigError(f"{file} names no format of pictures; end it with one of .{', .'.join(sorted(known))}")


def plot(timings: Sequence[Timing], file: str) -> None:
    """Draws distributions of the times to the first token, between tokens, and to the last one."""
    from matplotlib import pyplot

    done = [t for t in timings if t.error is None and t.gains]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), constrained_layout=True)
    for axis, title, values in (
        (axes[0], "time to first token", [t.first for t in done]),
        (axes[1], "between tokens", [gap for t in done for gap in t.between]),
        (axes[2], "whole request", [t.whole for t in done]),
    ):
        ordered = sorted(values)
        axis.plot([1000 * v for v in ordered], [(i + 1) / len(ordered) for i in range(len(ordered))])
        axis.set(title=title, xlabel="ms", ylabel="share of all", ylim=(0, 1))
        axis.grid(alpha=0.3)
    figure.savefig(file)
    pyplot.close(figure)
