"""Writes docs/verified.md out of the reports of `hybridrt verify` in docs/reports.

python scripts/verified_table.py
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrt.verify.against import read_report

ROOT = Path(__file__).parents[1]
REPORTS, DOCUMENT = ROOT / "docs" / "reports", ROOT / "docs" / "verified.md"
COMPILED = REPORTS / "compiled.json"
HEAD = """# What was verified

Each row is a report of [`hybridrt verify`](verify.md) in [reports](reports). "ran": the checks were
run on that machine. "compiled": `hybridrt compile --gpu` compiled the kernels for that GPU, and nothing ran. "not
tried": neither. `python scripts/verified_table.py` writes this page.

"""
SIGNS = {"passed": "ran", "warned": "ran, with warnings", "failed": "ran, and FAILED", "left out": "not tried"}
KERNELS = "compiled"
OUTPUTS = ("log-probabilities within", "answers have equal tokens")


def reports(folder: Path = REPORTS) -> list[dict[str, Any]]:
    """All reports, by model and device."""
    found = [read_report(str(file)) for file in sorted(folder.glob("*.json")) if file.name != COMPILED.name]
    return sorted(found, key=lambda report: (report["model"], report["machine"]["device"]))


def compiled(file: Path = COMPILED) -> list[dict[str, str]]:
    """{"model", "device", "torch"} of each configuration whose kernels were compiled."""
    return json.loads(file.read_text()) if file.exists() else []


def document(found: Sequence[dict[str, Any]], built: Sequence[dict[str, str]]) -> str:
    """The page: a table of models by machines, then each report's checks."""
    return HEAD + "\n".join([*_matrix(found, built), "", *_checks(found)]) + "\n"


def _matrix(found: Sequence[dict[str, Any]], built: Sequence[dict[str, str]]) -> list[str]:
    cells = {(row["model"], _where(row)): KERNELS for row in built}
    cells |= {(_model(row), _where(row["machine"])): SIGNS[row["status"]] for row in found}
    machines = sorted({where for _, where in cells})
    rows = [["model", *machines], ["---"] * (len(machines) + 1)]
    for model in sorted({model for model, _ in cells}):
        rows.append([model, *(cells.get((model, where), "not tried") for where in machines)])
    return [f"| {' | '.join(row)} |" for row in rows]


def _checks(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for report in found:
        machine, results = report["machine"], report["results"]
        lines += [f"## {_model(report)} on {machine['device']}", ""]
        seconds = sum(result["seconds"] for result in results)
        kind = f"a {'quick' if report['quick'] else 'whole'} run of {seconds:.0f} s"
        lines += [
            f"{kind} on {machine['date']}; hybridrt {machine['hybridrt']}, torch {machine['torch']}, transformers "
            f"{machine['transformers']}, Python {machine['python']}",
            "",
        ]
        lines += [f"- {result['name']}: {result['status']}{_told(result)}" for result in results]
        lines.append("")
    return lines[:-1]


def _told(result: dict[str, Any]) -> str:
    """What was found; else what says how close outputs were, or what the check did."""
    close = [note for note in result["notes"] if any(word in note for word in OUTPUTS)]
    told = result["findings"][:1] or close or result["notes"][:1]
    return f". {'; '.join(told)}" if told else ""


def _model(report: dict[str, Any]) -> str:
    note = f" ({report['note']})" if report.get("note") else ""
    return f"{report['model']}{note}"


def _where(machine: dict[str, Any]) -> str:
    return f"{machine['device']}, torch {machine['torch']}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(reports(), compiled()))
