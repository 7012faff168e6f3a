"""Compares the answers of two servers to the same requests."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrt.bench.timing import Timing, summary
from hybridrt.verify.two_servers import Answered

TIE = 0.1  # difference of two log-probabilities
MOST_CHANGED = 1000  # that are listed


@dataclass(frozen=True)
class Changed:
    """A request whose answers differ.

    Attributes:
        request: its number in the trace, from 0.
        place: the first token that differs.
        a, b: the tokens there, or texts around it.
        margin: how much likelier the first server held its own token; None if unknown.
    """

    request: int
    place: int
    a: str
    b: str
    margin: float | None


@dataclass
class Comparison:
    """Counts over all requests so far.

    Attributes:
        failed: requests that failed at the first and at the second server; failed_at_one: at one of them alone.
        by: how answers were compared: "ids", "tokens" or "text", and how often.
        largest, summed, compared: differences of log-probabilities up to the first token that differs.
    """

    requests: int = 0
    equal: int = 0
    failed: tuple[int, int] = (0, 0)
    failed_at_one: int = 0
    changed: list[Changed] = field(default_factory=list)
    changed_count: int = 0
    ties: int = 0
    by: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    summed: float = 0.0
    compared: int = 0
    errors: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    timings: tuple[list[Timing], list[Timing]] = field(default_factory=lambda: ([], []))

    def add(self, a: Sequence[Answered], b: Sequence[Answered]) -> None:
        """Answers to the next requests, in order."""
        for one, other in zip(a, b, strict=True):
            self._add(one, other)
            self.requests += 1

    def _add(self, a: Answered, b: Answered) -> None:
        for side, answer in enumerate((a, b)):
            self.timings[side].append(answer.timing)
            if answer.timing.error is not None:
                self.errors[side][answer.timing.error] += 1
        self.failed = (self.errors[0].total(), self.errors[1].total())
        if a.timing.error is not None or b.timing.error is not None:
            self.failed_at_one += a.timing.error is None or b.timing.error is None
            return
        by, first, second = _comparable(a, b)
        self.by[by] += 1
        place = next((i for i, (x, y) in enumerate(zip(first, second)) if x != y), min(len(first), len(second)))
        self._add_scores(a, b, place if by != "text" else 0)
        if place == len(first) == len(second):
            self.equal += 1
            return
        self._add_changed(by, a, b, place)

    def _add_scores(self, a: Answered, b: Answered, end: int) -> None:
        for x, y in zip(a.scores[:end], b.scores[:end]):
            self.largest = max(self.largest, abs(x - y))
            self.summed += abs(x - y)
            self.compared += 1

    def _add_changed(self, by: str, a: Answered, b: Answered, place: int) -> None:
        first, second = _shown(by, a, place), _shown(by, b, place)
        margin = None
        if by != "text" and place < min(len(a.tokens), len(b.tokens), len(a.others)):
            other = a.others[place].get(b.tokens[place])
            margin = None if other is None else a.scores[place] - other
        self.ties += margin is not None and margin < TIE
        self.changed_count += 1
        if len(self.changed) < MOST_CHANGED:
            self.changed.append(Changed(self.requests, place, first, second, margin))

    def as_json(self) -> dict[str, Any]:
        """Times are in milliseconds."""
        a, b = (summary(side) for side in self.timings)
        mean = self.summed / self.compared if self.compared else 0.0
        return {
            "requests": self.requests, "equal": self.equal, "changed": self.changed_count, "at_ties": self.ties,
            "failed": list(self.failed), "failed_at_one": self.failed_at_one, "compared_by": dict(self.by),
            "logprob_difference": {"largest": self.largest, "mean": mean, "tokens": self.compared},
            "changed_requests": [vars(each) for each in self.changed], "a": a, "b": b,
        }  # fmt: skip


def _comparable(a: Answered, b: Answered) -> tuple[str, Sequence[Any], Sequence[Any]]:
    """Token ids if both servers send them, else texts of tokens, else whole texts."""
    if a.ids and b.ids:
        return "ids", a.ids, b.ids
    if a.tokens and b.tokens:
        return "tokens", a.tokens, b.tokens
    return "text", a.text, b.text


def _shown(by: str, answer: Answered, place: int) -> str:
    if by == "text":
        return answer.text[max(place - 10, 0) : place + 20]
    name = answer.tokens[place] if place < len(answer.tokens) else ""
    if by == "ids":
        return f"{answer.ids[place]} {name!r}" if place < len(answer.ids) else "the end"
    return repr(name) if place < len(answer.tokens) else "the end"
