"""Named loads of a server, and a page of their figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hybridrt.base.errors import ConfigError
from hybridrt.bench.workload import WorkloadConfig

VOCAB = 32_000  # of most models, or less


class Load(NamedTuple):
    """`concurrency`: requests at a time; None: they come at the load's rate."""

    workload: WorkloadConfig
    concurrency: int | None = None


def _load(requests: int, prompt: int, rate: float, **more: Any) -> Load:
    return Load(
        WorkloadConfig(
            requests=requests, prompt_tokens=prompt, output_tokens=128, fixed=True, rate=rate, vocab=VOCAB, **more
        )
    )


SUITE: Mapping[str, Load] = {
    "10/s": _load(200, 512, 10.0),
    "20/s": _load(360, 512, 20.0),
    "30/s": _load(480, 512, 30.0),
    "saturated": Load(
        WorkloadConfig(requests=512, prompt_tokens=512, output_tokens=128, fixed=True, vocab=VOCAB), concurrency=256
    ),
    "long": _load(48, 4352, 4.0),
    "very-long": _load(12, 32768, 0.6),
    "shared": _load(120, 256, 8.0, data="shared-prefix", prefixes=16, prefix_tokens=4096),
    "mix": Load(WorkloadConfig(data="mix", requests=300, rate=9.16, vocab=VOCAB)),
}
ALL = "all"
COLUMNS = ("load", "requests", "failed", "seconds", "tokens/s", "first mean", "first p50", "first p99", "between p99")


def chosen(name: str, seed: int | None = None) -> dict[str, Load]:
    """One load, or all. ConfigError for another name.

    Each load has a seed of its own. With one seed, prompts of equal length would be the same in
    several loads, and a server with a prefix cache would have them already.
    """
    if name != ALL and name not in SUITE:
        raise ConfigError(f"suite is {name!r}; it must be {ALL} or one of {', '.join(SUITE)}")
    first = len(SUITE) * (seed or 0)
    loads = {
        each: load._replace(workload=replace(load.workload, seed=first + i))
        for i, (each, load) in enumerate(SUITE.items())
    }
    return loads if name == ALL else {name: loads[name]}


def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures of a load for COLUMNS. `found`: of `hybridrt.bench.timing.summary`."""
    first, between = found["time_to_first_token_ms"], found["inter_token_latency_ms"]
    numbers = (
        found["seconds"], found["output_tokens_per_second"], first["mean"], first["p50"], first["p99"], between["p99"]
    )  # fmt: skip
    return name, str(found["requests"]), str(found["failed"]), *(f"{number:.1f}" for number in numbers)


def page(rows: Sequence[Sequence[str]], facts: Mapping[str, Any]) -> str:
    """A page of figures in Markdown. Times are in milliseconds."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(["# Loads of a server", "", *lines, "", *(f"| {' | '.join(row)} |" for row in table), ""])
