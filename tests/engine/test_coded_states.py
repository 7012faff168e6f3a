"""Engines whose states are in 8 bits or rounded stochastically: near transformers, and alike in any batch."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import ConfigError
from hybridrt.engine.cache import host_fetches
from tests.support.checkpoints import VOCAB, CheckpointStore
from tests.support.levels import sweep
from tests.support.session import Session, greedy

# GDN, Mamba-2, KDA; how much more errors may grow, as other experts run.
MODELS = {"qwen-dense": 1, "mamba2-plain": 1, "kimi-plain": 4}
WAYS = {
    "int8": ({"mamba_ssm_dtype": "int8"}, 4e-2),
    "fp8": ({"mamba_ssm_dtype": "fp8"}, 0.15),
    "bfloat16": ({"mamba_ssm_dtype": "bfloat16", "mamba_ssm_rounding": "stochastic"}, 2e-2),
}


def prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(logits: Tensor, oracle: Tensor) -> float:
    return ((logits - oracle).abs().mean() / oracle.std()).item()


# By default each model runs in one way, and each way with one model.
@pytest.mark.parametrize(("name", "way"), sweep(product(MODELS, WAYS), len(WAYS) + 1, thin=3))
def test_logits_stay_near_and_do_not_depend_on_the_batch(name: str, way: str, checkpoints: CheckpointStore) -> None:
    """Alone in row 1; and in row 3 of a batch, with other lengths before it."""
    checkpoint, (options, tolerance) = checkpoints[name], WAYS[way]
    session = Session(checkpoint.path, **options)
    assert session.runner.target.state_mode == "replay"
    (alone,) = session.run([(prompt(37), 40)])
    oracle = checkpoint.logits(alone.prompt, alone.tokens)
    apart = error(alone.logits, oracle)
    assert 1e-6 < apart < tolerance * MODELS[name]
    batch = session.run([(prompt(5, 1), 40), (prompt(20, 2), 40), (prompt(37), 40)])
    assert batch[2].tokens == alone.tokens
    assert error(batch[2].logits, alone.logits) < 0.1 * apart


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_prefix_changes_nothing(name: str, checkpoints: CheckpointStore) -> None:
    session = Session(checkpoints[name].path, mamba_ssm_dtype="int8", cache_slots=4, prefix_cache=True)
    engine = session.engine(prefix_cache=True)
    logits = []
    for cached in (0, 32):
        session.logits.clear()
        engine.add_request(prompt(45), greedy(24, seed=7), "request")
        while engine.has_unfinished():
            for out in engine.step():
                assert out.error is None, out.error
                if out.metrics is not None:
                    assert out.metrics.cached_tokens == cached
        logits.append(torch.stack([session.logits[7, i] for i in range(24)]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_kept_as_its_request_stored_it(name: str, checkpoints: CheckpointStore) -> None:
    """Nothing is rounded again where a request ends with its prompt. Without a cache a chunk ends there."""
    session = Session(checkpoints[name].path, mamba_ssm_dtype="int8", cache_slots=4, prefix_cache=True)
    (chunked,) = session.run([(prompt(15), 24)], chunk=11)
    engine = session.engine(prefix_cache=True)
    for i, (text, count) in enumerate([(prompt(15)[:11], 1), (prompt(15), 24)]):
        engine.add_request(text, greedy(count, seed=i), str(i))
        while engine.has_unfinished():
            for out in engine.step():
                assert out.metrics is None or out.metrics.cached_tokens == 11 * i
    found = torch.stack([session.logits[1, i] for i in range(24)])
    torch.testing.assert_close(found, chunked.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sweep(["qwen-dense", "falcon-plain"], 2))
def test_memory_that_pages_share_changes_nothing(
    name: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and pages come and go in slabs full of NaN; the first text comes back from main memory at last."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    options: dict[str, Any] = {
        "mamba_ssm_dtype": "int8",
        "prefix_cache": True,
        "page_size": 4,
        "host_cache_bytes": 1 << 20,
    }
    options |= {"max_running_requests": 2, "max_model_len": 64}
    own = Session(checkpoints[name].path, **options, cache_slots=3)
    shared = Session(checkpoints[name].path, **options, budget_bytes=own.plan.pool_bytes)
    assert own.plan.slabs is None and shared.plan.slabs is not None and shared.plan.slabs.states is not None
    texts = [*[prompt(45, seed) for seed in range(12)], prompt(45, 0)]
    fetched, texts_saved = 0, {*range(12)}
    for session in (own, shared):
        engine = session.engine(prefix_cache=True)
        for i, text in enumerate(texts):
            engine.add_request(text, greedy(4, seed=i), str(i))
            while engine.has_unfinished():
                for out in engine.step():
                    assert out.error is None, out.error
            session.coordinator.check()
        # A chunk ends where a state is saved, and there is room for nearly all of them.
        texts_saved &= {plan.admissions[0].seed for plan in session.plans if plan.extend and plan.extend[0].saves}
        fetched = engine.counters().cache_fetched
    assert fetched and len(texts_saved) > 9
    for key in [key for key in own.logits if key[0] in {*texts_saved, 12}]:
        torch.testing.assert_close(shared.logits[key], own.logits[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_and_chunks_change_no_more_than_rounding(name: str, checkpoints: CheckpointStore) -> None:
    checkpoint, spec = checkpoints[name], SpeculativeConfig("ngram", num_draft_tokens=3, state_mode="replay")
    session = Session(checkpoint.path, mamba_ssm_dtype="int8", speculative=spec)
    (sample,) = session.run([(prompt(37), 40)], chunk=7)
    assert 1e-6 < error(sample.logits, checkpoint.logits(sample.prompt, sample.tokens)) < 4e-2 * MODELS[name]


REFUSED = {
    "another kind": ("mamba-plain", {}, 'mamba_ssm_dtype="int8" does not exist for Mamba-1; use mamba_ssm_dtype="bfl'),
    "another mode": ("qwen-dense", {"state_mode": "classic"}, 'needs state mode "replay".*state mode is "classic"'),
    "drafts that fork": (
        "qwen-dense", {"speculative": SpeculativeConfig("ngram", num_draft_tokens=2, state_mode="intermediate")},
        'state mode is "intermediate"',
    ),
    "rounding to nearest": ("qwen-dense", {"mamba_ssm_rounding": "nearest"}, "would lose what a state"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_what_to_do(what: str, checkpoints: CheckpointStore) -> None:
    name, options, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        Session(checkpoints[name].path, **{"mamba_ssm_dtype": "int8", **options})


def test_float32_states_are_not_rounded_stochastically(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match="has no use for float32 states"):
        Session(checkpoints["qwen-dense"].path, mamba_ssm_rounding="stochastic")
