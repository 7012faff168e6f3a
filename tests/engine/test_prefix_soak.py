"""Thousands of steps of random conversations through tiny pools with every tier: tokens stay right, nothing leaks."""

import random

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache import host_fetches, prefix_store
from hybridrt.engine.core import prompt_waiters
from hybridrt.engine.core.step_cost import StepCost
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.mem_cache.pools.slab_plan import SlabPlan
from hybridrt.mem_cache.pools.slabs import SlabShare
from hybridrt.runtime.step import pack_padded
from hybridrt.runtime.step.pack_padded import Bucket, StateSaves
from tests.support.cache_replica import Replica
from tests.support.engine_harness import VOCAB, Rig
from tests.support.mock_executor import Windows, tokens_alone

MAX_NODES = 2_000  # of both trees: pages and states bound them
LENGTH = 64
WINDOWS = (7,), (None, 7), (None, 3, 11)


class Talks:
    """Conversations that come and go: turns, branches, aborts, salts, several samples of a prompt, resets. Odd
    seeds in windows alone are of models without recurrent layers."""

    def __init__(
        self,
        seed: int,
        windows: Windows = (None,),
        slabs: SlabPlan | None = None,
        policy: TrafficPolicy | None = None,
    ) -> None:
        self.random, self.windows = random.Random(seed), windows
        slots = 9 if None in windows or seed % 2 == 0 else 0
        self.rig = Rig(
            rows=4, slots=slots, pages=90, page_size=self.random.choice((1, 2, 4)), max_model_len=LENGTH, chunk=12,
            late=1, drafts=seed % 2 * 3, replay=True, cache=True, grid=4, host=(120, 12),
            copy_delay=seed % 5, windows=windows, slabs=slabs, policy=policy,
        )  # fmt: skip
        self.replica = Replica(self.rig.engine.cache_events(10_000))
        self.histories: list[list[int]] = [[]]
        self.open: dict[str, tuple[list[int], SamplingParams]] = {}
        self.checked = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.open) < 8 and self.random.random() < 0.4:
                self.ask()
            if self.open and self.random.random() < 0.02:
                self.rig.engine.abort(self.random.choice(sorted(self.open)))
            if self.random.random() < 0.01:
                self.rig.engine.reset_prefix_cache()
            self.rig.step()
            self.take()
            self.replica.check(self.rig.pools)
        self.rig.run()
        self.take()

    def ask(self) -> None:
        history = self.random.choice(self.histories[-6:])
        cut = history[: self.random.randint(0, len(history))] if self.random.random() < 0.2 else history
        prompt = [*cut[: LENGTH - 20], *(self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 9)))]
        salt = self.random.choice((None, None, "a"))
        params = SamplingParams(
            max_tokens=self.random.choice((1, 3, 8)), seed=7, ignore_eos=True, n=self.random.choice((1, 1, 2)),
            cache_salt=salt, priority=self.random.choice((0, 0, 1)),
        )  # fmt: skip
        self.open[self.rig.engine.add_request(prompt, params)] = prompt, params

    def take(self) -> None:
        """Compares what has ended, and lets later requests go on from there."""
        for name in [name for name in self.open if not self.rig.engine._samples.samples_of_request(name)]:
            prompt, params = self.open.pop(name)
            sample = self.rig.outputs.pop((name, 0))
            for index in range(1, params.n):
                self.rig.outputs.pop((name, index))
            seen = self.windows, self.rig.executor.has_state
            wanted = tokens_alone(prompt, 7, len(sample.token_ids), VOCAB, *seen)
            assert sample.token_ids == wanted, name
            self.checked += 1
            self.histories.append([*prompt, *sample.token_ids])
        del self.histories[:-12]


def soak(
    seed: int,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    windows: Windows = (None,),
    slabs: SlabPlan | None = None,
    policy: TrafficPolicy | None = None,
) -> dict[str, int]:
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    monkeypatch.setattr(prompt_waiters, "LEAST_SHARED", 3)
    monkeypatch.setattr(prefix_store, "SPACED", 8)
    talks = Talks(seed, windows, slabs, policy)
    talks.run(steps)
    assert not talks.rig.engine._scheduler.num_waiting and not talks.rig.engine._scheduler._waiters._sources
    store, counters = talks.rig.pools.prefixes, talks.rig.engine.counters()
    trees = [store.tree, *([] if store.tier is None else [store.tier.tree])]
    assert len(trees) == 2 and sum(1 for tree in trees for _ in tree.nodes()) < MAX_NODES
    assert not store.tree.waiting and not store.tree._worths._awaited
    assert talks.rig.pools.fetches is None or not talks.rig.pools.fetches._looked
    assert talks.rig.engine.reset_prefix_cache()
    for pool in (talks.rig.pools.slots, talks.rig.pools.pages):
        assert not pool.num_used and not pool.num_cached
    talks.replica.check(talks.rig.pools)
    assert not any(talks.replica.held.values()) and not talks.replica.events.missed
    return {"checked": talks.checked, "hit": counters.cache_hit, "fetched": counters.cache_fetched}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_conversations_for_a_while(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(soak(seed, 120, monkeypatch).values()) > 0


@pytest.mark.parametrize("windows", [(None,), pytest.param((None, 7), marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.soak) for i in (2, 3))])
def test_random_conversations_with_a_policy(seed: int, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait for each other and leave spaced states, in graphs of both kinds."""
    saves = (StateSaves.SECOND_PASS, StateSaves.AT_CHUNKS)[seed % 2]
    monkeypatch.setattr(pack_padded, "TAIL", 3)
    held, hold = list[str](), prompt_waiters.PromptWaiters.hold
    monkeypatch.setattr(
        prompt_waiters.PromptWaiters, "hold", lambda *args: (held.append(args[1].request_id), hold(*args))
    )
    assert soak(seed, 300, monkeypatch, windows, policy=TrafficPolicy(cost=StepCost([Bucket(4, 9)], saves)))["hit"]
    assert len(held) > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_random_conversations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(soak(seed, 20_000, monkeypatch).values()) > 0


@pytest.mark.soak
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(2))
def test_random_conversations_in_windows(seed: int, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(soak(seed, 20_000, monkeypatch, windows).values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_conversations_in_windows_for_a_while(
    seed: int, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = soak(seed, 100, monkeypatch, windows)
    assert found["checked"] and found["hit"]


SHARED = {
    (None,): SlabPlan(1, 30, (SlabShare(4, 5),), states=SlabShare(1, 1)),
    (None, 7): SlabPlan(1, 40, (SlabShare(4, 9), SlabShare(2, 5)), states=SlabShare(1, 1)),
    (None, 3, 11): SlabPlan(1, 60, (SlabShare(3, 3), SlabShare(2, 4), SlabShare(1, 7)), states=SlabShare(2, 2)),
    (None, None, 1, 12, 12): SlabPlan(
        1, 90, (*[SlabShare(4, 5)] * 2, SlabShare(2, 6), *[SlabShare(1, 3)] * 2), states=SlabShare(2, 2)
    ),
    (3, 11): SlabPlan(1, 30, (SlabShare(5, 6), SlabShare(2, 8)), states=SlabShare(1, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("windows", SHARED)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_conversations_in_shared_memory_for_a_while(
    seed: int, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = soak(seed, 100, monkeypatch, windows, SHARED[windows])
    assert found["checked"] and found["hit"]


@pytest.mark.soak
@pytest.mark.parametrize("windows", SHARED)
@pytest.mark.parametrize("seed", range(2))
def test_random_conversations_in_shared_memory(seed: int, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(soak(seed, 20_000, monkeypatch, windows, SHARED[windows]).values()) > 0
