"""The stream of cache events of a whole engine: both tiers at every step, and why entries come and go."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import ConfigError
from hybridrt.engine.cache import host_fetches
from tests.engine.test_prefix_soak import WINDOWS, Talks
from tests.engine.test_sessions import TEXT, ask, build
from tests.support.cache_replica import Replica
from tests.support.checkpoints import CheckpointStore
from tests.support.engine_harness import Rig


@given(st.integers(0, 99), st.sampled_from([(None,), *WINDOWS]))
@settings(max_examples=4, deadline=None)
def test_the_events_give_the_contents_of_both_tiers_at_every_step(seed: int, windows: tuple[int | None, ...]) -> None:
    """Random conversations with aborts, retractions, resets, drafts and fetches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_fetches, "LEAST_TOKENS", 2)
        talks = Talks(seed, windows)
        talks.run(30)
    assert talks.replica.why["device", "gained", "computed"] and not talks.replica.events.missed


def test_why_a_request_leaves_entries() -> None:
    rig = Rig(cache=True, pages=16, rows=2)
    replica = Replica(rig.engine.cache_events(999))
    rig.finish([1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
    aborted = rig.add([2, 2, 3, 4, 5], max_tokens=20, ignore_eos=True)
    for _ in range(6):
        rig.step()
    rig.engine.abort(aborted)
    rig.run()
    replica.check(rig.pools)
    assert {why for _, _, why in replica.why} == {"computed", "finished", "aborted"}
    for first in (5, 6):  # more than the pages hold
        rig.add([first, 2, 3, 4, 5], max_tokens=40, ignore_eos=True)
    rig.run()
    replica.check(rig.pools)
    assert rig.engine.counters().retractions and replica.why["device", "gained", "retracted"]
    assert replica.why["device", "lost", "evicted"]


def test_a_reset_and_a_broken_step_say_so() -> None:
    rig = Rig(cache=True, host=(20, 4))
    replica = Replica(rig.engine.cache_events(999))
    rig.finish([1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
    rig.engine.reset_prefix_cache()
    replica.check(rig.pools)
    assert replica.why["device", "lost", "reset"] and replica.why["host", "cleared", "reset"]
    rig.finish([1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
    replica.check(rig.pools)
    assert all(replica.held.values())
    rig.pools.reclaim([])
    replica.check(rig.pools)
    assert replica.why["device", "cleared", "failed"] and replica.why["host", "cleared", "failed"]
    assert not any(replica.held.values())


def test_events_of_an_llm(checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to main memory and back, and a session."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    file = tmp_path / "talk.safetensors"
    with build(checkpoints["falcon-plain"].path, host_cache_bytes=1 << 22) as llm:
        replica = Replica(llm.cache_events())
        ask(llm, TEXT[:50], cache_salt="a")
        llm.save_session(file, TEXT[:50], cache_salt="a")
        replica.check(llm.engine._coordinator)
        assert replica.why["host", "moved", "copied"]
        store = llm.engine.prefixes
        store.evict([10_000], 10_000)
        replica.check(llm.engine._coordinator)
        assert not replica.held["device"] and replica.held["host"]
        ask(llm, TEXT[:55], cache_salt="a")
        replica.check(llm.engine._coordinator)
        assert replica.why["device", "moved", "fetched"]
        llm.load_session(file, cache_salt="b")
        replica.check(llm.engine._coordinator)
        assert replica.why["device", "gained", "loaded"]
        assert {entry.key.salt for held in replica.held.values() for entry in held} == {"a", "b"}
        late = Replica(llm.cache_events())
        late.check(llm.engine._coordinator)
        with pytest.raises(ConfigError, match="limit is 0; it must be"):
            llm.cache_events(limit=0)
