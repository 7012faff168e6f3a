"""The policy of few slots, held to what it reaches: without a model, in simulated time."""

import pytest

from benchmarks import bench_policy
from benchmarks.bench_policy import VOCAB, Case, measure
from benchmarks.bench_prefix import recomputed
from benchmarks.traces import Shape
from hybridrt.engine.cache.prefix_store import GRID
from tests.support.levels import sweep


@pytest.mark.parametrize(
    ("trace", "least"), sweep([("chat", 0.85), ("branching", 0.9), ("agents", 0.93), ("shared", 0.99)], 2)
)
def test_hit_rates_with_few_slots(trace: str, least: float) -> None:
    """Smaller and shorter than the benchmark, so a little below its shares."""
    row = measure(Case(trace, Shape(12, 4, 160, 20, VOCAB, 0), 0.0, 2, 4), 150)
    assert least < row["of bound"] <= 1 and row["bound"] <= row["unlimited"]


def test_runs_are_the_same_each_time_and_arrivals_are_spread() -> None:
    case = Case("chat", Shape(4, 2, 80, 6, VOCAB, 1), 0.6, 2, 4, think=5.0)
    first, second = (measure(case, 50) for _ in range(2))
    assert first == second
    assert all(item.delay > 0 for item in case.items())


@pytest.mark.parametrize("load", [0.0, 0.6])
def test_a_turn_computes_its_new_tokens_and_little_else(load: float) -> None:
    """With room for all states: at most GRID tokens more than those that no earlier request had. The one exception is a
    system prompt: the second conversation leaves the state at its end, unless it waits when the first one begins."""
    ran = Case("chat", Shape(4, 5, 120, 40, VOCAB, 0), load, 2, 60).play()
    by_admission = sorted(ran, key=lambda each: each.metrics.admission_time or 0.0)
    redone = {each.item.id: count for each, count in zip(by_admission, recomputed(ran), strict=True)}
    assert max(count for request, count in redone.items() if not request.endswith(".0")) <= GRID
    assert sum(count > GRID for count in redone.values()) == (load > 0)


@pytest.mark.parametrize("trace", sweep(["chat", "branching", "agents", "shared"], 4))
def test_windows_hit_as_much_as_full_attention_in_the_same_memory(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page groups and states share it; the tree keeps no more of a window than the next token sees. And one memory is
    worth as much as the best fixed split of it."""
    monkeypatch.setattr(bench_policy, "LONGEST", 1024)
    monkeypatch.setattr(bench_policy, "STATE_TOKENS", 128)
    tokens, rows, slots, shape = 2048, 2, 4, Shape(8, 3, 160, 20, VOCAB, 0)

    def hit(split: int = 0, windows: tuple[int | None, ...] = (None,)) -> int:
        pages = (tokens + (rows + slots - split) * 128) // 16
        monkeypatch.setattr(bench_policy, "NUM_PAGES", pages)
        case = Case(trace, shape, 0.0, rows, split - rows if split else slots, 0.0, windows, 0 if split else tokens)
        return sum(ran.metrics.cached_tokens for ran in case.play())

    full = hit()
    assert full >= 0.95 * max(hit(split) for split in (6, 12)), "slabs are a twentieth of the memory"
    assert min(hit(windows=(None, 64)), hit(windows=(None, 16, 128))) >= full
