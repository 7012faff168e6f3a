"""Results of checks, and the report of all of them."""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridrt.base.formats import Format

FORMAT = Format("hybridrt verify report", 1, "run hybridrt verify again")
PASSED, WARNED, FAILED, LEFT_OUT = "passed", "warned", "failed", "left out"
_ORDER = (LEFT_OUT, PASSED, WARNED, FAILED)
MOST_LINES = 20  # of one check


@dataclass
class Result:
    """The result of one check.

    Attributes:
        status: the worst that was found.
        findings: what is wrong, or may be. A finding names the file, field or tensor.
        notes: what was done, and what could not be.
        figures: numbers for programs.
    """

    name: str
    status: str = LEFT_OUT
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def done(self, note: str) -> None:
        """The check has run."""
        self.notes.append(note)
        self._raise_to(PASSED)

    def leave_out(self, why: str) -> None:
        self.notes.append(why)

    def warn(self, finding: str) -> None:
        self._found(WARNED, finding)

    def fail(self, finding: str) -> None:
        self._found(FAILED, finding)

    def _found(self, status: str, finding: str) -> None:
        self._raise_to(status)
        if len(self.findings) < MOST_LINES:
            self.findings.append(f"{status}: {finding}")
        else:
            self.figures["more_findings"] = self.figures.get("more_findings", 0) + 1

    def _raise_to(self, status: str) -> None:
        self.status = max(self.status, status, key=_ORDER.index)


@dataclass
class Parts:
    """Seconds of the parts of a check, in order. A part ends where the next one begins."""

    seconds: dict[str, float] = field(default_factory=dict)
    _name: str = ""
    _since: float = 0.0

    def begin(self, name: str) -> None:
        self.end()
        self._name, self._since = name, time.perf_counter()

    def end(self) -> None:
        if self._name:
            took = time.perf_counter() - self._since
            self.seconds[self._name] = round(self.seconds.get(self._name, 0.0) + took, 3)
        self._name = ""


@dataclass
class Report:
    """All results for one model.

    Attributes:
        model: as it was named. note: of the person who ran it.
        subject: facts of the checkpoint. machine: of this machine.
        hashes: sha256 of files and of tensors, for comparison with another report.
        config: the fields of config.json.
    """

    model: str
    quick: bool
    subject: dict[str, Any]
    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def status(self) -> str:
        return worst(result.status for result in self.results)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for result in found["results"]:
            result["figures"] = _finite(result["figures"])
        return {"format": str(FORMAT), "status": self.status, **found}


def _finite(figures: Any) -> Any:
    """Figures with None in place of NaN and infinity, which JSON has not: a damaged model gives them."""
    if isinstance(figures, dict):
        return {name: _finite(figure) for name, figure in figures.items()}
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def worst(statuses: Iterable[str]) -> str:
    return max(statuses, key=_ORDER.index, default=LEFT_OUT)
