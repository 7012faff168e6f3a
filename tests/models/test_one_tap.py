"""Causal convs of one tap: each input by a weight of its own channel, and no window that a later token needs."""

from pathlib import Path

import pytest

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from tests.models.test_models_parity import prompts, requests
from tests.support.checkpoints import Checkpoint, Make, falcon, falcon_mamba, jamba, lfm2, qwen, write
from tests.support.levels import sweep
from tests.support.newer_checkpoints import kimi
from tests.support.session import Session, check_sample
from tests.support.ties import check_greedy

HYBRID = ["linear_attention", "full_attention"]
MODELS: dict[str, Make] = {
    "mamba2": falcon(mamba_d_conv=1, mamba_n_groups=2, num_hidden_layers=1),
    "gdn": qwen(linear_conv_kernel_dim=1, num_hidden_layers=2, layer_types=HYBRID),
    "kda": kimi(linear_conv_kernel_dim=1, num_hidden_layers=2, layer_types=HYBRID),
    "short_conv": lfm2(conv_L_cache=1, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "mamba1": jamba(mamba_d_conv=1, num_hidden_layers=2, attn_layer_period=2, num_experts=1),
    "attention-free": falcon_mamba(conv_kernel=1, num_hidden_layers=1),
}
MODES = {name: ("classic",) if name in ("mamba1", "attention-free") else ("classic", "replay") for name in MODELS}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [40], [9, 9, 9, 9, 9]]


@pytest.mark.parametrize("name", sweep(MODELS, 4))
def test_chunks_and_mixed_steps(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, write(MODELS[name], tmp_path))
    for mode in MODES[name]:
        session = Session(tmp_path, state_mode=mode)
        for sample in session.run(requests(1, 17, 40, steps=20), chunk=7, gap=3):
            check_sample(checkpoint, sample, f"{name}, {mode}")
        assert session.num_mixed() > 0


@pytest.mark.parametrize("name", sweep(MODELS, 4))
def test_verify_steps(name: str, tmp_path: Path) -> None:
    """Chains in each state mode that there is, and trees."""
    write(MODELS[name], tmp_path)
    plain = texts(tmp_path)
    for state_mode, topk in [("intermediate", 1), ("intermediate", 2), ("replay", 1)][: 1 + len(MODES[name])]:
        drafts = SpeculativeConfig("ngram", num_draft_tokens=3, state_mode=state_mode, topk=topk)
        assert texts(tmp_path, drafts) == plain, (state_mode, topk)


def texts(path: Path, speculative: SpeculativeConfig | None = None) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(str(path), device="cpu", dtype="float32", max_model_len=64, speculative=speculative) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", MODELS)
def test_a_turn_that_goes_on_from_a_cached_state(name: str, tmp_path: Path) -> None:
    """Its tokens and those of main memory: a state without conv inputs is copied there and back."""
    checkpoint = Checkpoint(tmp_path, write(MODELS[name], tmp_path))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    sizes = {"max_model_len": 96, "max_running_requests": 2, "page_size": 4, "host_cache_bytes": 2**22}
    with LLM(str(tmp_path), device="cpu", dtype="float32", **sizes) as llm:  # type: ignore[arg-type]
        (text,) = prompts(19)
        answer = llm.generate([text], params)[0].token_ids
        turn = [*text, *answer, 5, 6, 7]
        output = llm.generate([turn], params)[0]
    assert output.metrics.cached_tokens == len(text) + len(answer) - 1
    check_greedy(output.token_ids, checkpoint.logits(turn, output.token_ids), name)
