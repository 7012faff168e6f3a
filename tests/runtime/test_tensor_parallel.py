"""Models split over 2 and 4 processes give the tokens of one. The processes are started once, for all tests here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError, EngineError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.cache import host_fetches
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.cache.sessions import Sessions
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.parallel.rank_start import start_ranks
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, ExtendRow, PageWrite, StepPlan
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter
from hybridrt.speculative.method import make_drafter
from tests.models.test_models_parity import prompts, requests
from tests.support.checkpoints import SPLIT, Checkpoint, CheckpointStore
from tests.support.levels import sweep
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.page_sets import page_sets
from tests.support.samples import Sample, Samples
from tests.support.session import Session, check_sample, greedy
from tests.support.speculation import Scripted, shifted
from tests.support.ties import check_greedy

# A third of the other models run on 2 ranks in the slow level. All do in the soak level, on 4 too: a model is cut in
# one way, whatever the number of ranks. Four processes start in test_tensor_parallel_life and _faults.
ON_TWO = ("falcon-split", "qwen-split", "kimi-split")
VERIFIED = (
    ("falcon-split", "replay"), ("nemotron-split_groups", "intermediate"), ("qwen-split", "intermediate"),
    ("qwen-split", "replay"), ("jamba-split", "intermediate"),
)  # fmt: skip


class Groups:
    """Running ranks by their number."""

    def __init__(self) -> None:
        self._started: dict[int, Ranks] = {}

    def __getitem__(self, size: int) -> Ranks:
        if size not in self._started:
            self._started[size] = start_ranks(size, "cpu")
        return self._started[size]

    def close(self) -> None:
        for ranks in self._started.values():
            ranks.close()


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    started = Groups()
    yield started
    started.close()


@contextmanager
def session(groups: Groups, checkpoint: Checkpoint, size: int, **config: Any) -> Iterator[Session]:
    split = Session(checkpoint.path, ranks=groups[size], tp_size=size, page_size=4, **config)
    yield split
    assert split.split is not None
    split.split.close()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(
            pytest.param(n, 2, marks=() if n in ON_TWO else pytest.mark.soak if i % 3 else pytest.mark.slow)
            for i, n in enumerate(SPLIT)
        ),
        *(pytest.param(n, 4, marks=pytest.mark.soak) for n in SPLIT),
    ],
)
def test_logits_and_tokens_of_one_process(name: str, size: int, groups: Groups, checkpoints: CheckpointStore) -> None:
    """Arrivals one after the other, prompts in chunks of 7 tokens: steps of every kind."""
    checkpoint = checkpoints[name]
    with session(groups, checkpoint, size) as split:
        samples = split.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)
        assert split.num_mixed() > 0
    for sample in samples:
        assert len(sample.tokens) == 12
        check_sample(checkpoint, sample, f"{name} on {size} ranks")


@pytest.mark.parametrize("name", sweep(["falcon-split", "kimi-split"], 2))
def test_codes_of_keys_and_values_have_one_processs_scales(
    name: str, groups: Groups, checkpoints: CheckpointStore
) -> None:
    checkpoint, asked = checkpoints[name], [(prompt, 5) for prompt in prompts(17, 30)]
    alone = Session(checkpoint.path, page_size=4, kv_cache_dtype="fp8_e4m3")
    wanted = [sample.logits for sample in alone.run(asked, chunk=7)]
    with session(groups, checkpoint, 2, kv_cache_dtype="fp8_e4m3") as split:
        assert split.runner.pools.kv.scales == alone.runner.pools.kv.scales
        got = [sample.logits for sample in split.run(asked, chunk=7)]
    for ours, theirs in zip(got, wanted, strict=True):
        # A number in the middle of two codes may become either: its rounding depends on the order of sums.
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", sweep(["falcon-split", "nemotron-split_groups", "qwen-split", "kimi-split"], 4))
def test_rings_of_recent_inputs(name: str, groups: Groups, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints[name]
    with session(groups, checkpoint, 2, state_mode="replay") as split:
        samples = split.run(requests(9, 20, steps=36), gap=2)
    for sample in samples:
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize(("name", "mode"), sweep([("falcon-split", "replay"), ("qwen-split", "classic")], 2))
def test_cached_prefixes(
    name: str, mode: str, groups: Groups, checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn, a turn whose path leaves the first one's, and samples of one prompt: every rank keeps its shard of
    the same states. A session brings each rank its shard again, and so does main memory."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    checkpoint = checkpoints[name]
    text = prompts(21)[0]
    answer = checkpoint.greedy(text, 7)
    asked = [text, [*text, *answer[:6], 5, 6, 7], [*text[:18], 9, 9, 9], [*text[:18], 8, 8]]
    with session(groups, checkpoint, 2, state_mode=mode, prefix_cache=True, host_cache_bytes=1 << 20) as split:
        engine, found = split.engine(prefix_cache=True, grid=4), Samples()
        for i, prompt in enumerate(asked):
            engine.add_request(prompt, greedy(7), str(i))
            while engine.has_unfinished():
                found.add(engine.step())
        assert [found[str(i), 0].metrics.cached_tokens for i in range(4)] == [0, 27, 0, 16]
        assert any(plan.page_copies for plan in split.plans) and any(row.saves for p in split.plans for row in p.extend)
        assert split.split is not None
        sessions = Sessions(split.split, split.coordinator, engine.turns, engine._change, lambda: None)
        saved = sessions.save(tmp_path / "talk", np.array(asked[1], np.int32), CacheKey(), "")
        assert engine.reset_prefix_cache() and sessions.load(tmp_path / "talk", CacheKey("again"), False) == replace(
            saved, cache_salt="again"
        )
        engine.add_request(asked[1], greedy(7, cache_salt="again"), "again")
        while engine.has_unfinished():
            found.add(engine.step())
        again = found["again", 0]
        assert (again.metrics.cached_tokens, again.token_ids) == (28, found["1", 0].token_ids)
        split.coordinator.prefixes.evict([10_000], 10_000)
        engine.add_request(asked[1], greedy(7, cache_salt="again"), "fetched")
        while engine.has_unfinished():
            found.add(engine.step())
        fetched = found["fetched", 0]
        assert (fetched.metrics.cached_tokens, fetched.token_ids) == (28, found["1", 0].token_ids)
        assert engine.counters().cache_fetched == 28
    for i, prompt in enumerate(asked):
        tokens = found[str(i), 0].token_ids
        check_greedy(tokens, checkpoint.logits(prompt, tokens), f"{name}, request {i}")


def outputs(
    executor: ModelRunner | TensorParallelExecutor, params: Sequence[SamplingParams], drafter: Drafter | None = None
) -> list[Sample]:
    """One request each, of prompts that differ."""
    runner = executor if isinstance(executor, ModelRunner) else executor.runner
    plan, model = runner.memory_plan, runner.model_config
    limits = EngineLimits(model.vocab_size, plan.max_model_len, 8192)
    pools = CacheCoordinator.from_plan(plan, runner.copied)
    engine = Engine(executor, pools, limits, overlap=False, drafter=drafter)
    for i, (prompt, wanted) in enumerate(zip(prompts(*range(5, 5 + len(params))), params)):
        engine.add_request(prompt, wanted, str(i))
    found = Samples()
    while engine.has_unfinished():
        found.add(engine.step())
    assert [output.error for output in found.values() if output.error] == []
    return [found[str(i), 0] for i in range(len(params))]


def config(checkpoint: Checkpoint, **changes: Any) -> EngineConfig:
    return EngineConfig(str(checkpoint.path), **{"device": "cpu", "dtype": "float32", "max_model_len": 128, **changes})


@pytest.mark.parametrize(("name", "state_mode"), sweep(VERIFIED, 3))
def test_drafts_are_verified_on_all_ranks(
    name: str, state_mode: str, groups: Groups, checkpoints: CheckpointStore
) -> None:
    """Drafts are the tokens that will come, the last one spoilt: verify steps keep some and drop some."""
    checkpoint = checkpoints[name]
    coming = {seed: checkpoint.greedy(prompt, 24) for seed, prompt in enumerate(prompts(5, 6))}
    spoilt = Scripted(coming, lambda tokens, request: [*tokens[:-1], *map(shifted, tokens[-1:])])
    speculative = SpeculativeConfig(num_draft_tokens=3, state_mode=state_mode)
    executor = TensorParallelExecutor(config(checkpoint, tp_size=2, speculative=speculative), ranks=groups[2])
    samples = outputs(executor, [greedy(16, seed=0), greedy(16, seed=1)], AdaptiveDrafter(spoilt, 3))
    for prompt, output in zip(prompts(5, 6), samples, strict=True):
        assert 0 < output.metrics.accepted < output.metrics.proposed
        check_greedy(output.token_ids, checkpoint.logits(prompt, output.token_ids), name)
    executor.close()


def test_a_draft_model_is_whole_on_rank_0(groups: Groups, checkpoints: CheckpointStore) -> None:
    """The drafter is the model itself: what it drafts stays."""
    checkpoint = checkpoints["falcon-split"]
    speculative = SpeculativeConfig("draft", num_draft_tokens=3, draft_model=str(checkpoint.path))
    drafted = config(checkpoint, tp_size=2, speculative=speculative)
    executor = TensorParallelExecutor(drafted, ranks=groups[2])
    (output,) = outputs(executor, [greedy(16)], make_drafter(executor.runner))
    executor.close()
    assert output.metrics.accepted == output.metrics.proposed > 0
    check_greedy(output.token_ids, checkpoint.logits(prompts(5)[0], output.token_ids), "draft model")


@pytest.mark.parametrize("name", sweep(["qwen", "nemotron-latent_groups"], 2))
def test_a_prediction_head_is_split_too(name: str, groups: Groups, tmp_path: Path) -> None:
    """Its drafts are those of one process: as many stay, of as many."""
    model = write_with_head(HEADS[name], tmp_path)
    checkpoint, params = Checkpoint(tmp_path, model), [greedy(16, seed=0), SamplingParams(max_tokens=16, seed=1)]
    drafted = config(checkpoint, speculative=SpeculativeConfig("mtp", num_draft_tokens=3))
    runner = ModelRunner(drafted)
    alone = outputs(runner, params, make_drafter(runner))
    executor = TensorParallelExecutor(replace(drafted, tp_size=2), ranks=groups[2])
    together = outputs(executor, params, make_drafter(executor.runner, executor.draft))
    executor.close()
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.metrics.proposed, ours.metrics.accepted) == (theirs.metrics.proposed, theirs.metrics.accepted)


def test_every_kind_of_sampling_draws_alike_on_all_ranks(groups: Groups, checkpoints: CheckpointStore) -> None:
    """Each rank draws for itself: one that drew another token would go on with another embedding."""
    checkpoint = checkpoints["falcon-split"]
    shared = {"max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.8, seed=1, **shared),
        SamplingParams(top_p=0.9, top_k=20, min_p=0.01, seed=2, **shared),
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, seed=3, logprobs=2, **shared),
    ]
    alone = outputs(ModelRunner(config(checkpoint)), params)
    executor = TensorParallelExecutor(config(checkpoint, tp_size=2), ranks=groups[2])
    together = outputs(executor, params)
    executor.close()
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    for ours, theirs in zip(together[-1].logprobs or (), alone[-1].logprobs or (), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_masks_reach_all_ranks(groups: Groups, checkpoints: CheckpointStore) -> None:
    """A launch before them, or masks of another shape, are refused before other ranks hear of it;
    a step that is given up is given up everywhere."""
    executor = TensorParallelExecutor(config(checkpoints["falcon-split"], tp_size=2), ranks=groups[2])
    words = -(-executor.runner.model_config.vocab_size // 32)
    params, pages = SamplingParams(temperature=0.0), executor.runner.pools.kv.page_size
    prompt = StepPlan(
        [Admission.from_prompt(row, row, [row, 5], params, 0) for row in (1, 2)],
        [PageWrite(row, 0, page_sets([row])) for row in (1, 2)],
        extend=[ExtendRow(row, 0, [row, 5], 0, True) for row in (1, 2)], constrained=[0, 1],
    )  # fmt: skip
    assert pages > 4
    masks = np.zeros((2, words), np.int32)
    masks[:, 0] = 1 << 6, 1 << 9
    step = executor.launch(prompt)
    with pytest.raises(EngineError, match="has not sampled"):
        executor.launch(StepPlan(decode=DecodeRows.from_rows([DecodeRow(1, 2, 1)])))
    with pytest.raises(EngineError, match="2 constrained lines"):
        step.sample(masks[:1])
    step.sample(masks)
    assert step.result().tokens == [[6], [9]] and not step.needs_masks
    decode = StepPlan(decode=DecodeRows.from_rows([DecodeRow(row, 2, 1) for row in (1, 2)]), constrained=[0])
    given_up = executor.launch(decode)
    given_up.drop()
    again = executor.launch(decode)
    again.sample(masks[1:])
    assert again.result().tokens[0] == [9]
    executor.close()


def test_one_model_at_a_time(groups: Groups, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints["falcon-split"]
    executor = TensorParallelExecutor(config(checkpoint, tp_size=2), ranks=groups[2])
    with pytest.raises(ConfigError, match="close that one first"):
        TensorParallelExecutor(config(checkpoint, tp_size=2), ranks=groups[2])
    assert len(outputs(executor, [greedy(3)])[0].token_ids) == 3
    executor.close()
    executor.close()
