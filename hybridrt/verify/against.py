"""Compares a checkpoint with an earlier report of it, from this machine or another one."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrt.base.config_json import read_object
from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.files import INDEX_BYTES
from hybridrt.verify.results import FORMAT, Result
from hybridrt.verify.subject import Subject


def read_report(file: str) -> dict[str, Any]:
    """ConfigError unless it is a report of `hybridrt verify` in JSON, of this version's form."""
    found = read_object(Path(file), ConfigError, INDEX_BYTES)
    if refusal := FORMAT.refusal(found.get("format")):
        raise ConfigError(f"{file} is no report of `hybridrt verify` that this version reads: {refusal}")
    hashes = found.get("hashes")
    parts = [hashes.get(name) for name in ("files", "tensors")] if isinstance(hashes, dict) else [None]
    if not all(isinstance(part, dict) for part in (*parts, found.get("config"))):
        raise ConfigError(f"{file} is no report of `hybridrt verify`: it has no hashes, or no config")
    return found


def compare_reports(subject: Subject, result: Result, report: Mapping[str, Any]) -> None:
    """Fields of config.json, files and tensors that differ from the other report's."""
    for place, ours, theirs in _differing(subject.raw, report["config"]):
        result.fail(f"config.json: {place} is {shown(ours)}; it was {shown(theirs)} in the other report")
    tensors, theirs = subject.hashes["tensors"], report["hashes"]["tensors"]
    for key in sorted(tensors.keys() & theirs.keys()):
        if tensors[key] != theirs[key]:
            result.fail(f"{key} differs from the other report's")
    for key in sorted(tensors.keys() ^ theirs.keys()) if tensors and theirs else ():
        result.warn(f"{key} is in one of the two reports alone (a quick run leaves out large tensors)")
    files, others = subject.hashes["files"], report["hashes"]["files"]
    for name in sorted(files.keys() & others.keys()):
        if files[name] != others[name] and not name.endswith(".safetensors") and name != "config.json":
            result.fail(f"{name} differs from the other report's")
    result.done(f"{len(tensors.keys() & theirs.keys())} tensors and {len(files.keys() & others.keys())} files compared")


def _differing(ours: Any, theirs: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in sorted(ours.keys() | theirs.keys()):
            yield from _differing(ours.get(name), theirs.get(name), f"{place}.{name}" if place else name)
    elif ours != theirs:
        yield place, ours, theirs
