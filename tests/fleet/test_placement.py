"""Where requests go: to the longest usable prefix, as long as queues stay about equal."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.bench_policy import VOCAB, Case
from benchmarks.bench_routing import measure
from benchmarks.traces import Shape
from hybridrt.base.errors import ConfigError
from hybridrt.fleet import placement
from hybridrt.fleet.placement import Placement, Replica
from hybridrt.fleet.prefix_mirror import CacheLayout, PrefixMirror, names_of

LAYOUT = CacheLayout(0, True, windows=())
TEXT = np.arange(100, dtype=np.int32)


def fleet(count: int) -> tuple[Placement, list[Replica]]:
    replicas = [Replica(str(i), PrefixMirror(LAYOUT)) for i in range(count)]
    made = Placement()
    for replica in replicas:
        made.add(replica)
    return made, replicas


def hold(replica: Replica, length: int) -> None:
    assert replica.mirror is not None
    replica.mirror.change("gained", "device", names_of(TEXT[:length]), np.empty((0, 3), np.int32), [length])


def test_the_longest_prefix_wins_until_its_replica_has_too_many_requests() -> None:
    made, replicas = fleet(4)
    hold(replicas[1], 40)
    hold(replicas[2], 80)
    placed = [made.place(names_of(TEXT)) for _ in range(8)]
    assert placed[0].replica is replicas[2] and (placed[0].prefix, placed[0].tokens) == (80, 20)
    assert placed[1].replica is replicas[1] and placed[1].prefix == 40
    counts = Counter(each.replica.name for each in placed)
    assert len(counts) == 4 and max(counts.values()) <= placement.MOST_OVER_MEAN * 8 / 4


def test_load_is_what_was_placed_and_has_not_ended() -> None:
    made, (replica,) = fleet(1)
    first, second = made.place(names_of(TEXT)), made.place(names_of(TEXT[:7]))
    assert (replica.requests, replica.tokens) == (2, 107)
    first.computed()
    assert (replica.requests, replica.tokens) == (2, 7)
    for _ in range(2):
        first.ended()
        second.ended()
    assert (replica.requests, replica.tokens) == (0, 0)


def test_waiting_tokens_count_against_a_prefix() -> None:
    made, replicas = fleet(2)
    hold(replicas[0], 10)
    replicas[0].tokens = 100
    assert made.place(names_of(TEXT)).replica is replicas[0]
    replicas[0].tokens = 1000
    assert made.place(names_of(TEXT)).replica is replicas[1]


def test_a_session_stays_where_it_was_without_a_longer_prefix_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    made, replicas = fleet(3)
    placed = made.place(names_of(TEXT), "a")
    placed.ended()
    for _ in range(3):
        again = made.place(names_of(TEXT), "a")
        assert again.replica is placed.replica
        again.ended()
    other = next(r for r in replicas if r is not placed.replica)
    hold(other, 50)
    made.place(names_of(TEXT), "a").ended()
    assert made.place(names_of(TEXT[:30]), "a").replica is other
    monkeypatch.setattr(placement, "SESSIONS", 2)
    for name in "bcd":
        made.place(names_of(TEXT), name)
    assert len(made._sessions) == 2


def test_requests_without_a_prefix_are_spread() -> None:
    made, _ = fleet(4)
    names = [made.place(names_of(TEXT)) for _ in range(8)]
    assert Counter(each.replica.name for each in names) == dict.fromkeys("0123", 2)
    for each in names:
        each.ended()
    found = Counter[str]()
    for _ in range(8):
        found[(each := made.place(names_of(TEXT))).replica.name] += 1
        each.ended()
    assert found == dict.fromkeys("0123", 2), "also while each one is idle"


def test_only_replicas_that_may_take_it() -> None:
    made, replicas = fleet(3)
    hold(replicas[0], 50)
    assert made.place(names_of(TEXT), among={"2"}).replica is replicas[2]
    made.remove("0")
    assert made.place(names_of(TEXT)).replica is not replicas[0]
    with pytest.raises(ConfigError, match="none of 2 replicas"):
        made.place(names_of(TEXT), among=set())


AT_ONCE = Case("chat", Shape(32, 4, 400, 10, VOCAB, 0), 0.0, 4, 40)
LOADED = [Case(trace, Shape(192, 4, 400, 100, VOCAB, 0), 7.5, 16, 60, 20.0) for trace in ("chat", "agents", "shared")]


@pytest.mark.parametrize("case", [AT_ONCE, *(pytest.param(case, marks=pytest.mark.soak) for case in LOADED)])
def test_hit_rate_and_queues(case: Case) -> None:
    """Of eight replicas, or four in the small form, compared with one engine that has the memory of all."""
    prefix, turns = measure(case, 4 if case is AT_ONCE else 8, ["prefix", "round robin"])
    assert prefix["of one cache"] >= 0.95 and prefix["queue"] <= 1.25
    assert turns["of one cache"] < (0.6 if case is AT_ONCE else 1)
