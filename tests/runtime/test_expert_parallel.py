"""Ranks that hold whole experts give the tokens of one process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt import LLM
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.moe import experts_of
from hybridrt.models.base import CausalLM
from hybridrt.models.loading import loader
from hybridrt.models.loading.weight_reader import read_tensors
from hybridrt.parallel import tensor_parallel
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.load.build_model import empty_model
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.speculative.drafter import AdaptiveDrafter
from hybridrt.speculative.method import make_drafter
from tests.models.test_models_parity import prompts, requests
from tests.runtime.test_tensor_parallel import Groups, config, outputs, session
from tests.runtime.test_tensor_parallel_shards import CPU, replayed
from tests.support.checkpoints import Checkpoint, CheckpointStore, Make, falcon, nemotron, qwen, write
from tests.support.levels import sweep
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.online import MODELS
from tests.support.samples import Samples
from tests.support.session import Session, check_sample, greedy
from tests.support.speculation import Scripted, shifted
from tests.support.ties import check_greedy
from tests.support.tiny import write_tiny

# Each family with experts: alone, with a shared one, with a gate of it, biases, a latent space.
FAMILIES = (
    "nemotron-split", "nemotron-split_groups", "qwen-split", "jamba-split", "lfm2_moe-split", "qwen35-split_experts",
    "granite-split", "kimi-split", "ling-split", "minimax-split", "minimax_published-split", "ling25-split",
    "gpt_oss-split", "lara-split", "nemotron-split_puzzle", "nemotron_omni-split",
)  # fmt: skip

SIX = ("granite-split", "nemotron-split_puzzle")  # experts in a layer
QUANTISED = [
    ("qwen", "fp8"), pytest.param("gpt_oss", "int4", marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (("qwen", "int4"), ("gpt_oss", "fp8"))),
]  # fmt: skip


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    started = Groups()
    yield started
    started.close()


def load(path: Path, tp: TPGroup) -> CausalLM:
    asked = EngineConfig(str(path), device="cpu", dtype="float32", tp_size=tp.size, expert_parallel=tp.size > 1)
    with torch.no_grad():
        model = empty_model(asked, load_target(asked, tp)[1], CPU)
        loader.load_weights(model, path)
    return model


def experts(model: CausalLM) -> dict[str, Tensor]:
    """What a rank holds of routed experts, by the name of the piece."""
    pieces = [piece for target in model.all_targets().values() for piece in target]
    return {piece.name: piece.dest for piece in pieces if ".experts." in piece.name and ".shared" not in piece.name}


@pytest.mark.parametrize("name", sweep(FAMILIES, 4))
def test_each_expert_is_whole_on_one_rank(
    name: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = checkpoints[name].path, list[str]()

    def reading(*args: Any) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in read_tensors(*args):
            read.append(key)
            yield key, tensor

    monkeypatch.setattr(loader, "read_tensors", reading)
    whole = load(path, TPGroup())
    all_keys, read[:] = set(read), []
    ranks = [load(path, TPGroup(rank, 2)) for rank in range(2)]
    count = experts_of(whole)[0].num_experts
    held = [experts(model) for model in ranks]
    assert not held[0].keys() & held[1].keys()
    for part, numbers in experts(whole).items():
        (own,) = (rank for rank in held if part in rank)
        assert torch.equal(own[part], numbers), part
    assert [experts_of(model)[0].share[:2] for model in ranks] == [(0, count // 2), (count // 2, count // 2)]  # type: ignore[index]
    own_keys = {key for key in all_keys if ".experts." in key and key.split(".experts.")[1][0].isdigit()}
    assert all(read.count(key) == (1 if key in own_keys else 2) for key in all_keys), "no rank reads another's"


@pytest.mark.parametrize(
    ("name", "size"),
    [*sweep([(name, 2) for name in FAMILIES], 8, thin=3), pytest.param("qwen-split", 4, marks=pytest.mark.slow)],
)  # fmt: skip
def test_ranks_draw_the_tokens_of_one(name: str, size: int, checkpoints: CheckpointStore) -> None:
    alone = Session(checkpoints[name].path, page_size=4, cache_slots=1)
    alone.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)
    for runner in replayed(alone, size, expert_parallel=True):
        assert torch.equal(runner.last_tokens, alone.runner.last_tokens)


@pytest.mark.parametrize(("name", "quantization"), QUANTISED)
def test_codes_of_one_process(name: str, quantization: str, tmp_path: Path) -> None:
    """Each rank quantises its own experts while they are loaded."""
    model, cls = MODELS[name][0]()
    setattr(model, {"qwen": "num_experts", "gpt_oss": "num_local_experts"}[name], 4)
    write(lambda: (model, cls), tmp_path)
    alone = Session(tmp_path, page_size=4, cache_slots=1, quantization=quantization)
    alone.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)
    for runner in replayed(alone, 2, expert_parallel=True):
        assert torch.equal(runner.last_tokens, alone.runner.last_tokens)


def test_tokens_are_counted_by_expert(checkpoints: CheckpointStore) -> None:
    """Those of all ranks, on each rank; padding is left out, and so is what the start computes (scales of codes)."""
    alone = Session(checkpoints["qwen-split"].path, page_size=4, cache_slots=1)
    alone.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)
    first, second = replayed(alone, 2, expert_parallel=True, kv_cache_dtype="fp8_e4m3")
    tokens = 1 + 17 + 30 + 3 * 11  # the last token of a request is no input
    found, chosen = first.expert_loads.read(), alone.runner.model_config.hf.num_experts_per_tok
    assert found == second.expert_loads.read() and alone.runner.expert_loads.read() == []
    for layer, experts_of_layer in zip(found, experts_of(first.model), strict=True):
        load = experts_of_layer.share.load  # type: ignore[union-attr]
        assert layer == [load[:4].sum(), load[4:].sum()] and sum(layer) == tokens * chosen  # type: ignore[index]


def expert_session(groups: Groups, checkpoints: CheckpointStore, name: str, size: int, **options: Any) -> Any:
    return session(groups, checkpoints[name], size, expert_parallel=True, **options)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.slow if size == 2 and i % 4 == 3 else pytest.mark.soak)
        for size in (2, 4)
        for i, name in enumerate(FAMILIES)
        if size == 2 or name not in SIX
    ],
)
def test_logits_and_tokens_of_one_process(name: str, size: int, groups: Groups, checkpoints: CheckpointStore) -> None:
    """Steps of every kind, in processes. Four ranks in one process are in the slow level, above."""
    with expert_session(groups, checkpoints, name, size) as split:
        samples = split.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)
        assert split.num_mixed() > 0
    for sample in samples:
        check_sample(checkpoints[name], sample, f"{name} on {size} ranks")


@pytest.mark.soak  # eight processes take half a minute to start
def test_eight_ranks(groups: Groups, tmp_path: Path) -> None:
    """One expert each; KV heads and groups are held by several ranks."""
    model = write(
        nemotron("ME*E", mamba_num_heads=8, n_groups=8, num_attention_heads=8, num_key_value_heads=2,
                 moe_shared_expert_intermediate_size=40, intermediate_size=48),
        tmp_path,
    )  # fmt: skip
    checkpoint = Checkpoint(tmp_path, model)
    with session(groups, checkpoint, 8, expert_parallel=True) as split:
        samples = split.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)
    for sample in samples:
        check_sample(checkpoint, sample, "8 ranks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("nemotron-split_groups", "intermediate", marks=pytest.mark.soak),
        ("qwen-split", "replay"),
        pytest.param("jamba-split", "intermediate", marks=pytest.mark.soak),
    ],
)
def test_drafts_are_verified(name: str, mode: str, groups: Groups, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints[name]
    coming = {seed: checkpoint.greedy(prompt, 24) for seed, prompt in enumerate(prompts(5, 6))}
    spoilt = Scripted(coming, lambda tokens, request: [*tokens[:-1], *map(shifted, tokens[-1:])])
    asked = config(
        checkpoint, tp_size=2, expert_parallel=True, speculative=SpeculativeConfig(num_draft_tokens=3, state_mode=mode)
    )
    executor = TensorParallelExecutor(asked, ranks=groups[2])
    samples = outputs(executor, [greedy(16, seed=0), greedy(16, seed=1)], AdaptiveDrafter(spoilt, 3))
    executor.close()
    for prompt, output in zip(prompts(5, 6), samples, strict=True):
        assert 0 < output.metrics.accepted < output.metrics.proposed
        check_greedy(output.token_ids, checkpoint.logits(prompt, output.token_ids), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "nemotron-latent_groups"])
def test_a_prediction_head_shares_its_experts(name: str, groups: Groups, tmp_path: Path) -> None:
    model = write_with_head(HEADS[name], tmp_path)
    checkpoint = Checkpoint(tmp_path, model)
    drafted = config(checkpoint, speculative=SpeculativeConfig("mtp", num_draft_tokens=3))
    runner = ModelRunner(drafted)
    (alone,) = outputs(runner, [greedy(16)], make_drafter(runner))
    executor = TensorParallelExecutor(replace(drafted, tp_size=2, expert_parallel=True), ranks=groups[2])
    (together,) = outputs(executor, [greedy(16)], make_drafter(executor.runner, executor.draft))
    executor.close()
    assert together.token_ids == alone.token_ids
    assert (together.metrics.proposed, together.metrics.accepted) == (alone.metrics.proposed, alone.metrics.accepted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kimi-split", pytest.param("qwen-split", marks=pytest.mark.soak)])
def test_cached_prefixes(name: str, groups: Groups, checkpoints: CheckpointStore) -> None:
    checkpoint, text = checkpoints[name], prompts(21)[0]
    asked = [text, [*text, *checkpoint.greedy(text, 7)[:6], 5, 6, 7], [*text[:18], 9, 9, 9]]
    with expert_session(groups, checkpoints, name, 2, prefix_cache=True) as split:
        engine, found = split.engine(prefix_cache=True, grid=4), Samples()
        for i, prompt in enumerate(asked):
            engine.add_request(prompt, greedy(7), str(i))
            while engine.has_unfinished():
                found.add(engine.step())
    assert found["1", 0].metrics.cached_tokens > 20
    for i, prompt in enumerate(asked):
        tokens = found[str(i), 0].token_ids
        check_greedy(tokens, checkpoint.logits(prompt, tokens), f"{name}, request {i}")


@pytest.mark.parametrize(
    ("make", "size", "text"),
    [
        (qwen(), 1, "expert_parallel shares experts over ranks, and tp_size is 1"),
        (falcon(), 2, "FalconH1ForCausalLM has no experts"),
        (qwen(num_experts=3), 2, "3 experts cannot be cut into 2"),
    ],
)
def test_what_cannot_be_shared_starts_nothing(
    make: Make, size: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "start_ranks", lambda *args: pytest.fail("processes were started"))
    path = str(write_tiny(tmp_path, make))
    with pytest.raises(ConfigError, match=text):
        LLM(path, device="cpu", load_format="dummy", tp_size=size, expert_parallel=True)


def test_experts_whose_channels_cannot_be_cut_are_shared(tmp_path: Path) -> None:
    """A rank has whole experts: their size may be odd."""
    path = write_tiny(tmp_path, nemotron("E", moe_intermediate_size=25))
    asked = EngineConfig(str(path), device="cpu", load_format="dummy", tp_size=2)
    for rank in range(2):
        tp, target = TPGroup(rank, 2), load_target(asked, TPGroup(rank, 2))[1]
        model = empty_model(replace(asked, expert_parallel=True), target, torch.device("meta"))
        assert [each.local for each in experts_of(model)] == [25]
        with pytest.raises(ConfigError, match="25 channels"):
            empty_model(asked, replace(target, tp=tp), torch.device("meta"))
