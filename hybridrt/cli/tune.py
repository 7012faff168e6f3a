"""`hybridrt tune`: measures on this GPU which tiles and kernels are fastest for a model's shapes."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.base.errors import ConfigError, DeviceError
from hybridrt.cli.options import EMBEDDED, EngineOptions, JsonOption, ModelArgument, SpeculativeOptions

if TYPE_CHECKING:
    import torch

    from hybridrt.base.device import GPUFacts
    from hybridrt.base.engine_config import EngineConfig
    from hybridrt.runtime.load.tuned_choices import TunedFile
    from hybridrt.runtime.tune.measure import Measured, Timer
    from hybridrt.runtime.tune.tune import MakeBench, Progress, Shapes, Tuning

MAX_SECONDS = 86_400.0


@dataclass(frozen=True)
class TuneRequest:
    """What a user asks for. output: None for the place where a run looks. gpu: of a dry run, a name of
    `hybridrt.base.device.KNOWN`; None for the GPU of this machine, or an H200 without one."""

    config: "EngineConfig"
    seconds: float
    output: str | None = None
    dry_run: bool = False
    fresh: bool = False
    gpu: str | None = None


@dataclass(frozen=True)
class Tuned:
    """A model's shapes on a GPU, and what was measured. path: the file; None: nothing was written."""

    gpu: str
    path: Path | None
    shapes: "Shapes"
    tuning: "Tuning"


def tune(
    model: ModelArgument = EMBEDDED,
    seconds: Annotated[float, typer.Option(metavar="N", help="Begin no measurement after so many seconds.")] = 600.0,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the choices here, not next to Triton's kernels.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the shapes, and measure nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Also measure shapes that the file has.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="h100|h200|a100|l40s|b200|rtx5090",
            help="With --dry-run: print those of this one. [the GPU of this machine, else h200]",
        ),
    ] = None,
    as_json: JsonOption = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Measure which tiles and kernels are fastest on this GPU.

    They are measured for one model's shapes, and the choice is stored. Reads config.json alone, and runs kernels over
    random numbers. The options are those of the later run: they decide the shapes. Nothing else may use the GPU
    meanwhile. A dry run needs no GPU.
    """
    from hybridrt.base.engine_config import EngineConfig

    config = EngineConfig(model, **engine.given(), **speculation.given(model))
    with _progress_line(hidden=as_json) as progress:
        found = tune_model(TuneRequest(config, seconds, output, dry_run, fresh, gpu), progress)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    else:
        _print(found)


def tune_model(asked: TuneRequest, progress: "Progress", timer: "Timer | None" = None) -> Tuned:
    """Measures, and writes the file. `timer`: for tests; it may time on a CPU.

    Raises:
        ConfigError: the model, an option or an earlier file cannot be used.
        DeviceError: there is no GPU here, and it is no dry run.
        ProviderNotInstalledError: Triton is not installed.
        EngineError: the model's shapes were not found.
    """
    from hybridrt.kernels.core.providers import require
    from hybridrt.models.config.read_config import read_model_config
    from hybridrt.runtime.load.model_path import checkpoint_path
    from hybridrt.runtime.load.tuned_choices import Origin, write_tuned
    from hybridrt.runtime.tune.model_shapes import choosing_for, model_shapes
    from hybridrt.runtime.tune.tune import Tuning, file_of, shapes_to_measure, tune

    require("triton", "hybridrt tune")
    if not 0 < asked.seconds <= MAX_SECONDS:
        raise ConfigError(f"seconds is {asked.seconds:g}; it must be more than 0 and at most {MAX_SECONDS:g}")
    if asked.gpu is not None and not asked.dry_run:
        raise ConfigError(f"gpu is {asked.gpu!r}; kernels are measured on the GPU of this machine: add --dry-run")
    device, gpu = _device(asked, timer)
    path = checkpoint_path(replace(asked.config, device="cpu"))  # the GPU may be elsewhere
    read_model_config(path)  # which refuses models that cannot run
    target = _target(asked, gpu)
    before = None if asked.fresh else _before(target, gpu)
    config = replace(asked.config, model=str(path), device="cuda")
    found = model_shapes(config, gpu)
    if asked.dry_run:
        with choosing_for(gpu) as pretended:
            return Tuned(gpu.name, None, shapes_to_measure(found, pretended), Tuning())
    shapes = shapes_to_measure(found, device)
    with _benches(device, timer) as make_bench:
        tuning = tune(shapes, device, make_bench, asked.seconds, _table(before, device, target), progress)
    write_tuned(target, file_of(tuning, Origin.of_gpu(gpu), before))
    return Tuned(gpu.name, target, shapes, tuning)


def _device(asked: TuneRequest, timer: "Timer | None") -> "tuple[torch.device, GPUFacts]":
    """Where to measure, and the GPU. A dry run measures nothing: its device may be a CPU."""
    import torch

    from hybridrt.base.device import GPUFacts, gpu_count, known_gpu, resolve_device, use_gpu

    name = asked.config.device
    if asked.dry_run and name != "cpu" and (asked.gpu is not None or not gpu_count()):
        return torch.device("cpu"), known_gpu(asked.gpu or "h200")
    device = resolve_device(name)
    if device.type == "cuda":
        use_gpu(device)
        return device, GPUFacts.of_device(device)
    if timer is not None:
        return device, known_gpu("h200")
    raise DeviceError(
        f"hybridrt tune measures kernels on a GPU, and the device is {str(device)!r}; run it on the machine that "
        "will serve the model, or see with --dry-run --gpu h200 what it measures"
    )


@contextmanager
def _benches(device: "torch.device", timer: "Timer | None") -> "Iterator[MakeBench]":
    from hybridrt.runtime.tune.bench_process import BenchProcess
    from hybridrt.runtime.tune.tune import local_benches

    if timer is not None:
        yield local_benches(device, timer)
        return
    process = BenchProcess(device)
    try:
        yield process.bench
    finally:
        process.end()


def _target(asked: TuneRequest, gpu: "GPUFacts") -> Path:
    from hybridrt.runtime.load.tuned_choices import VARIABLE, tuned_path

    path = tuned_path(gpu) if asked.output is None else Path(asked.output).expanduser()
    if path is None:
        raise ConfigError(f"{VARIABLE}=0 turns tuned choices off; unset it, or name a file with --output")
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a directory; name a file")
    return path


def _before(path: Path, gpu: "GPUFacts") -> "TunedFile | None":
    """The earlier file, if it is of this GPU and these versions."""
    from hybridrt.runtime.load.tuned_choices import Origin, read_tuned

    if not path.exists():
        return None
    file = read_tuned(path)
    return file if file.origin == Origin.of_gpu(gpu) else None


def _table(before: "TunedFile | None", device: "torch.device", path: Path) -> Any:
    from hybridrt.runtime.load.tuned_choices import table_of

    return {} if before is None else table_of(before, device, path)


@contextmanager
def _progress_line(hidden: bool) -> "Iterator[Callable[[int, int, str], None]]":
    from tqdm.auto import tqdm

    with tqdm(desc="tune", unit="shape", disable=True if hidden else None) as bar:

        def show(done: int, total: int, what: str) -> None:
            bar.total = total
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)

        yield show


def _as_json(found: Tuned) -> dict[str, Any]:
    from hybridrt.runtime.load.tuned_choices import fields_of

    return {
        "gpu": found.gpu,
        "path": None if found.path is None else str(found.path),
        "shapes": [{"launch": name, "shape": fields_of(shape)} for name, shape in found.shapes],
        "measured": [
            {
                "launch": m.launch, "shape": fields_of(m.shape), "built_in": dict(m.built_in), "values": dict(m.values),
                "built_in_us": m.built_in_seconds * 1e6, "us": m.seconds * 1e6, "same_bits": m.same_bits,
                "candidates": m.candidates, "refused": [{"values": dict(r.values), "why": r.why} for r in m.refused],
            }
            for m in found.tuning.measured
        ],
        "known": found.tuning.known, "left": found.tuning.left, "skipped": found.tuning.skipped,
    }  # fmt: skip


def _print(found: Tuned) -> None:
    from hybridrt.cli.tables import console, print_table
    from hybridrt.runtime.load.tuned_choices import fields_of

    out, tuning = console(), found.tuning
    if found.path is None:
        shapes = [(name, _shown(fields_of(shape))) for name, shape in found.shapes]
        print_table(out, f"Shapes to measure on {found.gpu}", ("launch", "shape"), shapes)
        return
    won = [_row(m) for m in tuning.measured if m.won]
    columns = ("launch", "shape", "built in, us", "tuned, us", "change", "output")
    print_table(out, f"Tuned choices on {found.gpu}", columns, won, ("built in, us", "tuned, us"))
    refused = sum(len(m.refused) for m in tuning.measured)
    tried = sum(m.candidates for m in tuning.measured)
    out.print(
        f"{len(won)} of {len(tuning.measured)} measured shapes have a faster choice; {refused} of {tried} candidates "
        f"were refused; the file had {tuning.known} shapes. It is {found.path}",
        markup=False,
    )
    for line in tuning.skipped:
        out.print(f"skipped: {line}", markup=False)
    if tuning.left:
        out.print(f"No time was left for {tuning.left} shapes: run it again to measure them.", markup=False)


def _row(found: "Measured") -> tuple[str, ...]:
    from hybridrt.runtime.load.tuned_choices import fields_of

    times = f"{found.built_in_seconds * 1e6:.2f}", f"{found.seconds * 1e6:.2f}"
    output = "same bits" if found.same_bits else "within tolerance"
    return found.launch, _shown(fields_of(found.shape)), *times, _change(found.built_in, found.values), output


def _shown(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _change(before: Any, after: Any) -> str:
    names = dict.fromkeys((*before, *after))
    return ", ".join(
        f"{name} {before.get(name, '-')} -> {after.get(name, '-')}"
        for name in names
        if before.get(name) != after.get(name)
    )
