"""Logits and greedy tokens on the GPU, in float32, against transformers' own models."""

from typing import Any

import pytest
import torch

from hybridrt import LLM, SpeculativeConfig
from tests.gpu.rig import DECODING, DEVICE, FAMILIES, GPU, MAMBA1, VERIFYING, GpuSession
from tests.models.test_models_parity import requests
from tests.support.checkpoints import CheckpointStore
from tests.support.session import Session, budget, check_sample, greedy
from tests.support.ties import check_greedy

pytestmark = GPU
LENGTHS = (1, 2, 17, 40)
UNEVEN = (
    "falcon-odd_sizes", "nemotron-odd_sizes", "qwen-unequal_head_dims", "nemotron-latent_experts_in_groups",
    "falcon_mamba-odd_sizes", "jamba-odd_sizes", "qwen35-unequal_head_dims", "granite-odd_sizes", "lfm2-odd_sizes",
    "zamba2-odd_sizes", "minimax-odd_sizes", "gpt_oss-odd_sizes", "lara-odd_sizes",
)  # fmt: skip


@pytest.mark.parametrize(("name", "state_mode"), [*DECODING, ("gpt_oss-plain", "classic")])
def test_ragged_batch(name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    """Whole prompts of several lengths in one step, then decode steps as graphs."""
    checkpoint = checkpoints[name]
    for sample in GpuSession(checkpoint.path, state_mode=state_mode).run(requests(*LENGTHS)):
        assert len(sample.tokens) == 64
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["falcon-plain", "qwen-plain", "kimi-plain", "gpt_oss-plain", "swa_ssm-plain"])
def test_codes_of_keys_and_values(name: str, graphs: bool, checkpoints: CheckpointStore) -> None:
    """The scales and, but for numbers in the middle of two codes, the logits of a CPU, until another token is drawn."""
    path, codes = checkpoints[name].path, "fp8_e4m3"
    here = GpuSession(path, cuda_graph=graphs, kv_cache_dtype=codes)
    there = Session(path, kv_cache_dtype=codes)
    assert here.runner.pools.kv.scales == there.runner.pools.kv.scales
    asked = requests(*LENGTHS, steps=12)
    for ours, theirs in zip(here.run(asked, chunk=19), there.run(asked, chunk=19), strict=True):
        pairs = zip(ours.tokens, theirs.tokens, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours.tokens) - 1) + 1
        torch.testing.assert_close(ours.logits[:same], theirs.logits[:same], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_sizes(name: str, checkpoints: CheckpointStore) -> None:
    """Head and state dimensions that are no powers of two, eagerly."""
    checkpoint = checkpoints[name]
    for sample in GpuSession(checkpoint.path, cuda_graph=False).run(requests(3, 33, steps=40), chunk=19):
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", [*FAMILIES, *MAMBA1])
def test_chunks_mixed_batches_and_retraction(name: str, graphs: bool, checkpoints: CheckpointStore) -> None:
    """Arrivals one after the other, chunks of 7 tokens, and KV for a little more than one request out of three."""
    checkpoint = checkpoints[name]
    config: dict[str, Any] = {"page_size": 4, "max_model_len": 112, "max_running_requests": 3, "device": DEVICE}
    memory = budget(checkpoint.path, rows=3, pages=30, **config)
    session = GpuSession(checkpoint.path, budget_bytes=memory, cuda_graph=graphs, **config)
    samples = session.run(requests(*LENGTHS), chunk=7, gap=3)
    assert session.num_mixed() > 0
    if session.plan.num_pages and not name.startswith("swa_ssm"):  # its pages go back before they run out
        assert sum(sample.retractions for sample in samples) > 0
    for sample in samples:
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize("name", [*FAMILIES, *MAMBA1])
def test_long_prompts_in_chunks(name: str, checkpoints: CheckpointStore) -> None:
    """Prompts of several scan chunks, each computed in steps of another size."""
    checkpoint = checkpoints[name]
    for sample in GpuSession(checkpoint.path, max_model_len=256).run(requests(200, 130, 64, steps=5), chunk=90):
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize(("name", "state_mode"), VERIFYING)
def test_drafts_change_nothing_but_the_number_of_steps(
    name: str, state_mode: str, checkpoints: CheckpointStore
) -> None:
    """Drafts of the model itself, which are right, and of prompt lookup, which seldom are."""
    checkpoint, steps = checkpoints[name], 40
    prompts = [prompt for prompt, _ in requests(*LENGTHS)]
    for method in ("draft", "ngram"):
        draft_model = str(checkpoint.path) if method == "draft" else None
        speculative = SpeculativeConfig(method, num_draft_tokens=3, draft_model=draft_model, state_mode=state_mode)
        llm = LLM(
            str(checkpoint.path), device=DEVICE, dtype="float32", speculative=speculative, max_model_len=128,
            max_running_requests=3, chunked_prefill_size=24,
        )  # fmt: skip
        for out in llm.generate(prompts, greedy(steps)):
            assert len(out.token_ids) == steps
            check_greedy(out.token_ids, checkpoint.logits(out.prompt_token_ids, out.token_ids), f"{name}, {method}")
        counters = llm.engine.counters()
        assert counters.accepted <= counters.proposed
        assert method == "ngram" or counters.proposed > 0  # random text may repeat nothing
        assert method == "ngram" or counters.accepted > counters.proposed / 2
