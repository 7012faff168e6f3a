"""`hybridrt doctor`: the platform, and which provider serves each operation and why."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hybridrt.cli.options import JsonOption

if TYPE_CHECKING:
    from hybridrt.base.device import GPUFacts
    from hybridrt.base.tried import Trial
    from hybridrt.kernels.core.providers import ReportRow

PACKAGES = (
    "hybridrt", "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy",
    "llguidance",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceReport:
    """A device of this machine. `note`: further facts, such as the compute capability."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int
    note: str = ""


@dataclass(frozen=True)
class TunedReport:
    """A file of choices that `hybridrt tune` measured. launches: shapes with another choice than the built-in one, and
    all that were measured, by launch. objection: why no run here uses it; None if runs do."""

    path: str
    gpu: str
    made: str
    launches: dict[str, tuple[int, int]]
    objection: str | None


@dataclass(frozen=True)
class TriedReport:
    """What was tried on GPUs like one of this machine. here: how this GPU, torch and Triton differ from it."""

    gpu: str
    trials: "list[Trial]"
    here: str


@dataclass(frozen=True)
class DoctorReport:
    """The output of `hybridrt doctor`. A version is None if the package is missing. `warnings` name
    untested versions. `kv_codes`: for each attention backend why it cannot serve
    kv_cache_dtype="fp8_e4m3" on the last device; None if it can."""

    platform: str
    python: str
    versions: dict[str, str | None]
    warnings: list[str]
    devices: list[DeviceReport]
    tried: list[TriedReport]
    attention_backends: list[str]
    kv_codes: dict[str, str | None]
    operations: "list[ReportRow]"
    tuned: list[TunedReport]


def doctor(as_json: JsonOption = False) -> None:
    """Show the platform, versions, devices and kernel providers.

    For each operation: which provider serves it, and why not the others.
    """
    report = examine()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report)


def examine() -> DoctorReport:
    """Looks at the machine; imports no optional package but Triton.

    Raises:
        ConfigError: HYBRIDRT_PROVIDERS names what does not exist.
    """
    import torch

    from hybridrt.kernels.core.providers import PROVIDERS, report
    from hybridrt.recurrent.backends import attention_backend_names, objections_to_codes

    devices, gpus = _devices(), _gpus()
    distributions = [p.distribution for p in PROVIDERS.values() if p.distribution]
    installed = {name: _installed(name) for name in dict.fromkeys((*PACKAGES, *distributions))}
    versions = {name: None if found is None else found.version for name, found in installed.items()}
    own = _installed("hybridrt")  # None in a checkout that is not installed
    return DoctorReport(
        platform=platform.platform(),
        python=platform.python_version(),
        versions=versions,
        warnings=untested(versions, (own.requires if own else None) or []),
        devices=devices,
        tried=tried_on(gpus, torch.__version__, versions["triton"]),
        attention_backends=attention_backend_names(),
        kv_codes=objections_to_codes(torch.device(devices[-1].name)),
        operations=report(tuple(dict.fromkeys(d.name.split(":")[0] for d in devices))),
        tuned=tuned_files(gpus),
    )


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def tuned_files(gpus: "list[GPUFacts]") -> list[TunedReport]:
    """The files of tuned choices of this machine, those that cannot be used too; none without Triton."""
    from hybridrt.kernels.core.providers import is_installed

    if not is_installed("triton"):
        return []
    from hybridrt.runtime.load.tuned_choices import VARIABLE, tuned_folder, tuned_path

    paths = sorted(tuned_folder().glob("*.json"))
    if named := os.environ.get(VARIABLE):
        paths += [path for path in map(tuned_path, gpus[:1]) if path is not None and path not in paths]
    off = f"{VARIABLE} is {named}" if named is not None else None
    return [_tuned_file(path, gpus, off) for path in paths]


def _tuned_file(path: Path, gpus: "list[GPUFacts]", off: str | None) -> TunedReport:
    from hybridrt.base.errors import ConfigError
    from hybridrt.runtime.load.tuned_choices import Origin, read_tuned, tuned_path

    try:
        file = read_tuned(path)
    except ConfigError as e:
        return TunedReport(str(path), "", "", {}, str(e))
    users = [gpu for gpu in gpus if tuned_path(gpu) == path]
    objection = off if not users and off else "no GPU here looks for it" if not users else None
    for gpu in users:
        objection = objection or file.origin.objection(Origin.of_gpu(gpu))
    counts: dict[str, tuple[int, int]] = {}
    for choice in file.choices:
        other, whole = counts.get(choice.launch, (0, 0))
        counts[choice.launch] = other + (choice.microseconds < choice.built_in_microseconds), whole + 1
    return TunedReport(str(path), file.origin.gpu, file.made, counts, objection)


def tried_on(gpus: "list[GPUFacts]", torch: str, triton: str | None) -> list[TriedReport]:
    """Of each sort of GPU once. `torch`: as `torch.__version__`; `triton`: None if it is not installed."""
    from hybridrt.base.tried import compared, trials_like

    sorts = {gpu.name: trials_like(gpu.capability) for gpu in gpus}
    return [TriedReport(name, found, compared(name, found, torch, triton)) for name, found in sorts.items()]


def untested(versions: dict[str, str | None], requirements: list[str]) -> list[str]:
    """A line for each installed version outside the bounds of `requirements`."""
    from packaging.requirements import Requirement

    lines = []
    for requirement in map(Requirement, requirements):
        version = versions.get(requirement.name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            lines.append(f"{requirement.name} {version} is untested: hybridrt was tested with {requirement.specifier}")
    return lines


def _devices() -> list[DeviceReport]:
    import torch

    from hybridrt.base.device import GPUFacts, has_bfloat16, visible_gpus
    from hybridrt.runtime.load.host_memory import free_host_memory, total_host_memory

    total = total_host_memory()
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores in use"
    found = [DeviceReport("cpu", platform.processor() or platform.machine(), free_host_memory(), total, threads)]
    for device in (torch.device("cuda", i) for i in range(visible_gpus())):
        gpu = GPUFacts.of_device(device)
        note = f"sm_{gpu.capability[0]}{gpu.capability[1]}, CUDA {torch.version.cuda}"
        if not has_bfloat16(device):
            note += ", no bfloat16"
        found.append(DeviceReport(str(device), gpu.name, gpu.free_bytes, gpu.total_bytes, note))
    return found


def _gpus() -> "list[GPUFacts]":
    import torch

    from hybridrt.base.device import GPUFacts, visible_gpus

    return [GPUFacts.of_device(torch.device("cuda", i)) for i in range(visible_gpus())]


def _print(report: DoctorReport) -> None:
    from hybridrt.cli.tables import bytes_text, console, print_table

    out = console()
    out.print(f"[bold]{report.platform}[/], Python {report.python}\n")
    versions = [(name, version or "not installed") for name, version in report.versions.items()]
    print_table(out, "Packages", ("name", "version"), versions)
    out.print()
    for line in report.warnings:
        out.print(f"[bold yellow]Warning:[/] {line}\n")
    devices = [
        (d.name, d.description, f"{bytes_text(d.free_bytes)} of {bytes_text(d.total_bytes)} free", d.note)
        for d in report.devices
    ]
    print_table(out, "Devices", ("name", "what", "memory", "notes"), devices)
    out.print()
    for tried in report.tried:
        rows = [(" ".join(each.gpus), each.torch or "-", each.triton, each.what) for each in tried.trials]
        if rows:
            print_table(out, f"What was tried on a GPU like {tried.gpu}", ("GPU", "torch", "Triton", "what"), rows)
        out.print(f"{tried.here}\n", markup=False)
    out.print(f"[bold]Attention backends[/]\n{', '.join(report.attention_backends)}\n")
    codes = [(name, why or "yes") for name, why in report.kv_codes.items()]
    print_table(out, f"KV cache of fp8_e4m3 on {report.devices[-1].name}", ("backend", "serves it"), codes)
    out.print()
    if report.tuned:
        print_table(out, "Tuned choices", ("file", "of", "made", "used", "faster, of measured"), _tuned_rows(report))
        out.print()
    print_table(out, "Operations", ("provider", "device", "why not the others", "operations"), _groups(report))


def _tuned_rows(report: DoctorReport) -> list[tuple[str, ...]]:
    return [
        (
            each.path, each.gpu or "-", each.made or "-", f"no: {each.objection}" if each.objection else "yes",
            "; ".join(f"{name}: {other} of {whole}" for name, (other, whole) in each.launches.items()) or "-",
        )
        for each in report.tuned
    ]  # fmt: skip


def _groups(report: DoctorReport) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in report.operations:
        reasons: dict[str, list[str]] = {}
        for name, why in row.others.items():
            reasons.setdefault(why, []).append(name)
        others = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
        groups.setdefault((row.device, row.picked or "none", others), []).append(row.op)
    found = sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1])))
    return [(picked, device, others or "-", ", ".join(ops)) for (device, picked, others), ops in found]
