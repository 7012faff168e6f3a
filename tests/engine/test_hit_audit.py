"""Audited hits: a flipped bit of a cached entry is found, right entries stay, and requests break audits off."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import LLM, AsyncLLM, SamplingParams
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.engine.core.hit_audit import EXACT_TOLERANCE, HitAudit, difference
from hybridrt.engine.core.scheduler import AUDIT_CHUNK
from tests.engine.test_cache_miss import ROOM, TEXT, ask
from tests.engine.test_prefix_states import rig_with_cache
from tests.support.engine_harness import Rig

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
PROMPT = [5, 6, 7, 8, 9] * 8


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("embedded", device="cpu", max_model_len=128, max_running_requests=4, audit_hits=1.0) as made:
        yield made


def hit(llm: LLM) -> int:
    """A request leaves its prompt in the cache, and a second one starts there. Returns the length."""
    llm.generate(PROMPT, PARAMS)
    (found,) = llm.generate([*PROMPT, 3, 2], PARAMS)
    assert found.metrics.cached_tokens
    return found.metrics.cached_tokens


def audit(llm: LLM) -> None:
    while llm.engine.audit_step():
        pass
    llm.engine.finish_launched()


def flip(tensor: torch.Tensor) -> None:
    """Flips the sign bit of its greatest number."""
    words, place = tensor.view(torch.int32).view(-1), int(tensor.abs().argmax())
    words[place] ^= -(2**31)


def cached(llm: LLM) -> tuple[Any, Any]:
    """The match of the prompt in the cache."""
    match, states = llm.engine.prefixes.path(np.array(PROMPT, np.int32), llm.engine.cache_key(PARAMS))
    return match, states


def test_entries_that_are_right_stay_and_nothing_is_left(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    length = hit(llm)
    before, dump = llm.engine.counters(), llm.engine.cache_dump()
    audit(llm)
    after = llm.engine.counters()
    assert (after.audited, after.audit_differed, after.cache_dropped) == (1, 0, 0) and after.audit_error < 1e-3
    assert (after.cache_asked, after.cache_hit) == (before.cache_asked, before.cache_hit)
    assert llm.engine.cache_dump() == replace(dump, nodes=llm.engine.cache_dump().nodes)
    assert (after.cached_slots, after.cached_pages) == (before.cached_slots, before.cached_pages)
    assert (after.free_rows, after.free_slots) == (before.free_rows, before.free_slots)
    assert cached(llm)[0].length >= length and not caplog.records


@pytest.mark.parametrize("what", ["state", "kv"])
def test_a_flipped_bit_is_found(what: str, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    length = hit(llm)
    match, states = cached(llm)
    pools = llm.engine.executor.pools.req_to_token  # type: ignore[attr-defined]
    if what == "state":
        (slot,) = [slot for end, slot in states if end == length]
        flip(next(iter(pools.mamba_pool._caches.values())).temporal[slot.index])
    else:
        pool = llm.engine.executor.pools.kv  # type: ignore[attr-defined]
        keys = next(iter(pool._layers.values()))[0]
        flip(keys[int(match.pages[0, 0])])
    audit(llm)
    counters = llm.engine.counters()
    assert (counters.audited, counters.audit_differed, counters.cache_dropped) == (1, 1, 1), counters.audit_error
    assert counters.audit_error > EXACT_TOLERANCE and cached(llm)[0].length == 0
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "its entries are dropped" in caplog.records[0].message
    (again,) = llm.generate([*PROMPT, 3, 2], PARAMS)
    assert again.metrics.cached_tokens == 0


def rig(fraction: float = 1.0, **config: Any) -> Rig:
    made = rig_with_cache(**ROOM | config)
    made.engine.audit_hits(HitAudit(fraction, 0.1))
    return made


def test_a_request_breaks_an_audit_off() -> None:
    """It waits for no further step of the audit, which is done later."""
    made = rig(pages=800)
    for _ in range(2):
        ask(made, TEXT[:280])
    assert made.engine.wants_audit
    assert made.engine.audit_step() and made.engine.has_unfinished()
    widths = [len(row.tokens) for row in made.executor.plans[-1].extend]
    assert max(widths) == AUDIT_CHUNK
    steps = len(made.executor.plans)
    made.add([9] * 5, "live", max_tokens=2, ignore_eos=True)
    made.run()
    rows = [len(row.tokens) for plan in made.executor.plans[steps:] for row in plan.extend]
    assert rows == [5] and made.engine.counters().audited == 0
    while made.engine.audit_step():
        pass
    made.engine.drain()
    made.assert_empty()
    assert made.engine.counters().audited == 1


def test_an_audit_does_not_begin_while_a_request_runs() -> None:
    made = rig()
    for _ in range(2):
        ask(made, TEXT[:40])
    made.add(TEXT[100:120], "live", max_tokens=9, ignore_eos=True)
    assert not made.engine.audit_step() and made.engine.counters().steps
    made.run()
    assert made.engine.audit_step()


def test_nothing_is_evicted_for_an_audit() -> None:
    made = rig(slots=3)
    for _ in range(2):
        ask(made, TEXT[:40])
    cached = made.engine.counters().cached_slots
    assert made.engine.wants_audit and not made.engine.audit_step() and not made.engine.wants_audit
    assert made.engine.counters().cached_slots == cached > 0


def test_a_fraction_of_hits_is_audited() -> None:
    made = rig(0.25)
    for _ in range(120):
        ask(made, TEXT[:40])
    assert 10 < len(made.engine.audits.chosen._waiting) < 50  # type: ignore[union-attr]
    none = rig(0.0)
    for _ in range(9):
        ask(none, TEXT[:40])
    assert not none.engine.wants_audit


def test_a_server_audits_when_it_idles(llm: LLM) -> None:
    async def serve() -> None:
        with AsyncLLM(llm) as served:
            await served.complete(PROMPT, PARAMS)
            await served.complete([*PROMPT, 3, 2], PARAMS)
            while not llm.engine.counters().audited:
                await asyncio.sleep(0.01)
            assert (await served.complete([*PROMPT, 3, 2], PARAMS)).metrics.cached_tokens

    asyncio.run(asyncio.wait_for(serve(), 60))


def test_differences_of_log_probabilities() -> None:
    assert difference({1: -0.5, 2: -1.0}, {1: -0.5, 2: -1.5}) == 0.5
    assert difference({1: -0.5, 2: -1.0}, {3: -1.0, 4: -1.25}) == 0.75, "token 1 has at most -1.25 there"
    assert difference({1: -0.5}, {1: -0.5}) == 0.0


def test_the_option_is_a_share() -> None:
    for value in (-0.1, 1.1, "all"):
        with pytest.raises(ConfigError, match="audit_hits"):
            EngineConfig("x", audit_hits=value)  # type: ignore[arg-type]
