"""Measures the launches of a model, shape by shape, and makes a file of choices."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from hybridrt.kernels.core.launch_choice import LAUNCHES, Tuned, Values, use_tuned
from hybridrt.kernels.dense.skinny_linear_triton import TiledProduct
from hybridrt.runtime.load.tuned_choices import MAX_CHOICES, Choice, Origin, TunedFile, fields_of
from hybridrt.runtime.tune.decode_attention import paged_decode
from hybridrt.runtime.tune.measure import Bench, LocalBench, Measured, ShapeSkippedError, Timer, measure
from hybridrt.runtime.tune.products import few_tokens, library_product, tiled_product
from hybridrt.runtime.tune.scans import delta_pass, mamba2_scan
from hybridrt.runtime.tune.trial import MakeTrial

# In the order of measurement: whether a product is fused depends on its tile.
TRIALS: dict[str, MakeTrial] = {
    "skinny_linear": tiled_product, "product of few tokens": few_tokens, "product of a library": library_product,
    "attention_decode": paged_decode, "chunk_gated_delta_rule: pass": delta_pass,
    "mamba2_chunk_scan: outputs": mamba2_scan, "mamba2_chunk_scan: gains": mamba2_scan,
}  # fmt: skip

Shapes = Sequence[tuple[str, Any]]
Progress = Callable[[int, int, str], None]  # shapes done, all of them, what is next
MakeBench = Callable[[str, Any, Tuned], Bench]  # a launch, its shape, and what won before


@dataclass
class Tuning:
    """What was measured.

    Attributes:
        skipped: shapes that cannot be measured, and why.
        left: shapes for which no time was left.
        known: shapes that an earlier file has.
    """

    measured: list[Measured] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    left: int = 0
    known: int = 0


def shapes_to_measure(found: Shapes, device: torch.device) -> Shapes:
    """Shapes with more than one candidate, in the order of TRIALS, each once. A product that is not fused today gets
    a tile too: without one it could not win."""
    tiles = [
        ("skinny_linear", TiledProduct(shape.rows, shape.columns, shape.tokens, shape.dtype))
        for name, shape in found
        if name == "product of few tokens"
    ]
    wanted = dict.fromkeys((*found, *tiles))
    several = [(name, shape) for name, shape in wanted if len(LAUNCHES[name].candidates(shape, device)) > 1]
    order = list(TRIALS)
    return sorted(several, key=lambda pair: order.index(pair[0]))


def local_benches(device: torch.device, timer: Timer) -> MakeBench:
    """Benches in this process, which a candidate may end. For tests: see `BenchProcess`."""

    def make(name: str, shape: Any, tuned: Tuned) -> Bench:
        use_tuned(device, tuned)
        return LocalBench(LAUNCHES[name], shape, device, TRIALS[name], timer)

    return make


@torch.no_grad()
def tune(
    shapes: Shapes, device: torch.device, make_bench: MakeBench, seconds: float, known: Tuned, progress: Progress
) -> Tuning:
    """Measures shapes that `known` lacks until the time is over. A shape that was begun is measured to its end.
    EngineError if a bench fails."""
    end, tuning = time.monotonic() + seconds, Tuning()
    # It grows: later trials run with earlier winners.
    table: dict[str, dict[tuple[Any, ...], Values]] = {name: dict(of) for name, of in known.items()}
    for done, (name, shape) in enumerate(shapes):
        progress(done, len(shapes), f"{name} {' '.join(map(str, fields_of(shape).values()))}")
        if shape in table.get(name, {}):
            tuning.known += 1
        elif time.monotonic() >= end:
            tuning.left += 1
        else:
            try:
                found = measure(LAUNCHES[name], shape, device, make_bench(name, shape, table))
            except ShapeSkippedError as e:
                tuning.skipped.append(f"{name} {fields_of(shape)}: {e}")
                continue
            tuning.measured.append(found)
            table.setdefault(name, {})[shape] = found.values
    progress(len(shapes), len(shapes), "done")
    return tuning


def file_of(tuning: Tuning, origin: Origin, before: TunedFile | None) -> TunedFile:
    """A file of what was measured, and of what an earlier file of the same origin has."""
    new = [_choice(found) for found in tuning.measured]
    measured = {_key(choice) for choice in new}
    kept = [choice for choice in (before.choices if before else ()) if _key(choice) not in measured]
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return TunedFile(made, origin, [*kept, *new][-MAX_CHOICES:])


def _choice(found: Measured) -> Choice:
    return Choice(
        found.launch, fields_of(found.shape), dict(found.values), round(found.seconds * 1e6, 3),
        round(found.built_in_seconds * 1e6, 3), found.same_bits,
    )  # fmt: skip


def _key(choice: Choice) -> tuple[str, Iterable[tuple[str, object]]]:
    return choice.launch, tuple(sorted(choice.shape.items()))
