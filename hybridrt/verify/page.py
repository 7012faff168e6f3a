"""A report as a page in Markdown."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

SIGNS = {"passed": "passed", "warned": "**warned**", "failed": "**FAILED**", "left out": "left out"}
_MARKS = re.compile(r"[\\|*\[\]~]")


def page(report: Mapping[str, Any]) -> str:
    """A page that can be attached to an issue. `report`: Report.as_json."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    subject, machine = report["subject"], report["machine"]
    yield f"# {cell(report['model'])}: {report['status']}"
    yield ""
    yield f"`hybridrt verify`{' --quick' if report['quick'] else ''} of a checkpoint on one machine."
    yield ""
    for name, value in (("note", report["note"] or None), *subject.items(), *machine.items()):
        if value is not None:
            yield f"- {name}: {cell(value)}"
    yield ""
    yield "| check | result | seconds |"
    yield "|---|---|---|"
    for result in report["results"]:
        yield f"| {cell(result['name'])} | {SIGNS[result['status']]} | {result['seconds']:.1f} |"
    for result in report["results"]:
        yield ""
        yield f"## {result['name']}"
        yield ""
        yield from (f"- {cell(line)}" for line in (*result["findings"], *result["notes"]))
        if parts := result["figures"].get("seconds_of_parts"):
            yield f"- seconds: {cell(', '.join(f'{part} {seconds:.1f}' for part, seconds in parts.items()))}"
        if more := result["figures"].get("more_findings"):
            yield f"- and {more} more"
    files = report["hashes"]["files"]
    if files:
        yield ""
        yield "## sha256 of files"
        yield ""
        yield from (f"- {cell(name)} {cell(digest)}" for name, digest in files.items())


def cell(value: Any) -> str:
    """On one line, and not as Markdown of its own: names come from checkpoints, and texts from
    servers. None becomes a picture that a reader's program fetches."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")
    return _MARKS.sub(r"\\\g<0>", text)
