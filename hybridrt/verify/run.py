"""All checks of one checkpoint, in order."""

import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.device import gpu_name
from hybridrt.base.errors import HybridrtError, reason
from hybridrt.base.version import __version__
from hybridrt.verify.against import compare_reports
from hybridrt.verify.files import check_config, check_hashes, check_keys_of, check_tensors
from hybridrt.verify.outputs import check_transformers, check_ways, compile_early
from hybridrt.verify.results import Parts, Report, Result
from hybridrt.verify.rope import check_rope
from hybridrt.verify.rope_fit import check_rope_fit
from hybridrt.verify.speed import check_speed
from hybridrt.verify.subject import Subject
from hybridrt.verify.tasks import check_tasks
from hybridrt.verify.text import check_template, check_tokenizer
from hybridrt.verify.weights_fit import check_weights_fit

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
Check = Callable[[Subject, Result], None]
CHECKS: dict[str, Check] = {
    "config": check_config, "rope": check_rope, "tokenizer": check_tokenizer, "template": check_template,
    "hashes": check_hashes, "keys": check_keys_of, "tensors": check_tensors, "transformers": check_transformers,
    "speed": check_speed, "ways to run": check_ways, "rope by text": check_rope_fit,
    "weights by text": check_weights_fit,
}  # fmt: skip
LONG = ("rope by text", "weights by text")
FATAL = ("config", "keys")  # without them no model is made


def verify(
    subject: Subject, *, tasks: Sequence[str] = (), limit: int | None = None, against: dict[str, Any] | None = None,
    begin: Callable[[str], None] = lambda name: None,
) -> Report:  # fmt: skip
    """Runs all checks. A check that raises has failed, and the others go on.

    Args:
        tasks, limit: of lm-eval, and questions of each.
        against: another report of the same checkpoint.
        begin: gets each check's name before it runs.
    """
    checks = {name: check for name, check in CHECKS.items() if not (subject.quick and name in LONG)}
    if tasks:
        checks["tasks"] = partial(check_tasks, tasks=tasks, limit=limit)
    if against is not None:
        checks["other report"] = partial(compare_reports, report=against)
    results = []
    try:
        compile_early(subject)
        for name, check in checks.items():
            begin(name)
            results.append(_run(name, check, subject))
    finally:
        subject.close()
        subject.early.close()
    # A report may be published: a folder is named without the folders that it lies in.
    model = subject.path.name if Path(subject.model).exists() else subject.model
    return Report(model, subject.quick, _facts(subject), machine(subject), results, subject.hashes, subject.raw)


def names(quick: bool, tasks: bool, against: bool) -> list[str]:
    """The checks that such a run has."""
    found = [name for name in CHECKS if not (quick and name in LONG)]
    return found + ["tasks"] * tasks + ["other report"] * against


def _run(name: str, check: Check, subject: Subject) -> Result:
    result, start, subject.parts = Result(name), time.perf_counter(), Parts()
    try:
        check(subject, result)
    except Exception as e:  # packages raise anything for an odd checkpoint
        known = isinstance(e, HybridrtError)
        result.fail(" ".join((str(e) if known else f"{type(e).__name__}: {reason(e)}").split()))
        if name in FATAL:
            subject.broken = f"not run: the check {name!r} has failed"
    subject.parts.end()
    if subject.parts.seconds:
        result.figures["seconds_of_parts"] = subject.parts.seconds
    for lines in (result.findings, result.notes):
        lines[:] = [_without_folder(line, subject.path) for line in lines]
    result.seconds = round(time.perf_counter() - start, 3)
    return result


def _without_folder(text: str, path: Path) -> str:
    """Errors name files by their whole path, and a report may be published."""
    for folder in (path, path.resolve()):
        if len(folder.parts) > 1:
            text = text.replace(f"{folder}/", "").replace(str(folder), folder.name)
    return text


def machine(subject: Subject) -> dict[str, Any]:
    """This machine, and the versions of what runs."""
    device = subject.torch_device
    cpu = platform.processor() or platform.machine()
    found: dict[str, Any] = {
        "device": gpu_name(device) if device.type == "cuda" else f"CPU {cpu}, {torch.get_num_threads()} threads",
        "platform": f"{platform.system()} {platform.machine()}", "python": platform.python_version(),
        "hybridrt": __version__, "cuda": torch.version.cuda, "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }  # fmt: skip
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _facts(subject: Subject) -> dict[str, Any]:
    config = subject.config
    if config is None:
        return {"architectures": subject.raw.get("architectures")}
    return {
        "architecture": config.architecture, "layers": len(config.layers), "vocab_size": config.vocab_size,
        "dtype": str(subject.torch_dtype).removeprefix("torch."),
        "quantization": None if config.quant is None else config.quant.rules.name,
    }  # fmt: skip
