"""`hybridrt compile`: fills Triton's cache with the kernels of a model, on this machine or for an image."""

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridrt.base.errors import ConfigError, DeviceError, EngineError
from hybridrt.cli.options import EMBEDDED, EngineOptions, JsonOption, ModelArgument, SpeculativeOptions

if TYPE_CHECKING:
    from hybridrt.base.device import GPUFacts
    from hybridrt.base.engine_config import EngineConfig
    from hybridrt.runtime.precompile.compile_ahead import CompileReport


@dataclass(frozen=True)
class Compiled:
    """Kernels of a model in a cache, and the wall time that they took."""

    model: str
    gpu: str
    cache_dir: str
    report: "CompileReport"
    seconds: float


def compile(
    model: ModelArgument = EMBEDDED,
    cache_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Triton's cache. [TRITON_CACHE_DIR, or ~/.triton/cache]")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="h100|h200|a100|l40s|b200|rtx5090", help="Compile for this one. [the GPU of this machine]"
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Processes. [one a core, up to 16]")] = None,
    as_json: JsonOption = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    speculation: SpeculativeOptions = SpeculativeOptions(),  # noqa: B008
) -> None:
    """Compile the kernels of a model before its first start.

    Needs a C compiler, and with --gpu no GPU. Reads config.json alone. The options are those of the later run: others
    may need other kernels. The cache works only at the path where it was filled.
    """
    from hybridrt.base.engine_config import EngineConfig

    config = EngineConfig(model, **engine.given(), **speculation.given(model))
    made = compile_model(config, gpu, cache_dir, workers)
    if as_json:
        typer.echo(json.dumps(_as_json(made), indent=2))
    else:
        _print(made)


def compile_model(config: "EngineConfig", gpu: str | None, cache_dir: str | None, workers: int | None) -> Compiled:
    """Fills a cache. Changes TRITON_CACHE_DIR of this process.

    Raises:
        ConfigError: the model or an option cannot be used.
        DeviceError: no GPU is named, and there is none here.
        ProviderNotInstalledError: Triton is not installed.
        EngineError: a kernel is missing in the cache.
    """
    from hybridrt.kernels.core.providers import require
    from hybridrt.models.config.read_config import read_model_config
    from hybridrt.runtime.load.model_path import checkpoint_path
    from hybridrt.runtime.precompile.compile_ahead import CompileAhead, default_workers
    from hybridrt.runtime.precompile.triton_key import TritonKey

    require("triton", "hybridrt compile")
    if config.device not in ("auto", "cuda") and not config.device.startswith("cuda:"):
        raise ConfigError(f"device is {config.device!r}; kernels are compiled for GPUs: leave --device out")
    workers = max(default_workers(), 1) if workers is None else workers
    if not 1 <= workers <= 1024:
        raise ConfigError(f"workers is {workers}; it must be a number of processes from 1 to 1024")
    facts, path = _gpu(config, gpu), checkpoint_path(replace(config, device="cpu"))  # the GPU may be elsewhere
    read_model_config(path)  # which refuses models that cannot run
    if cache_dir is not None:
        os.environ["TRITON_CACHE_DIR"] = str(_writable(cache_dir))
    import triton

    start = time.perf_counter()
    ahead = CompileAhead(replace(config, model=str(path), device="cuda"), workers, TritonKey())
    try:
        ahead.start_compiling(facts)
        report = ahead.wait()
    finally:
        ahead.close()
    if missing := [*report.failures, *report.problems]:
        raise EngineError(f"the cache lacks kernels: {'; '.join(missing)}")
    seconds = time.perf_counter() - start
    return Compiled(str(path), facts.name, str(triton.knobs.cache.dir), report, seconds)


def _gpu(config: "EngineConfig", name: str | None) -> "GPUFacts":
    from hybridrt.base.device import GPUFacts, gpu_count, known_gpu, resolve_device

    if name is not None:
        return known_gpu(name)
    if not gpu_count():
        raise DeviceError("there is no GPU here; name the one to compile for, such as --gpu h200")
    return GPUFacts.of_device(resolve_device("cuda" if config.device == "auto" else config.device))


def _writable(directory: str) -> Path:
    path = Path(directory).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--cache-dir: {directory} cannot be made: {e.strerror}") from e
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--cache-dir: {directory} cannot be written")
    return path


def _as_json(made: Compiled) -> dict[str, Any]:
    return {
        "model": made.model, "gpu": made.gpu, "cache_dir": made.cache_dir, "kernels": made.report.kernels,
        "seconds": made.seconds, "seconds_by_kernel": made.report.seconds,
    }  # fmt: skip


def _print(made: Compiled) -> None:
    from hybridrt.cli.tables import console, print_table

    out = console()
    rows = sorted(made.report.seconds.items(), key=lambda row: -row[1])
    print_table(
        out,
        "Kernels",
        ("kernel", "seconds of a core"),
        [(name, f"{s:.1f}") for name, s in rows],
        ("seconds of a core",),
    )
    out.print(
        f"{made.report.kernels} kernels for {made.gpu} are in {made.cache_dir}, after {made.seconds:.1f} s",
        markup=False,
    )
