"""Logits and greedy tokens against transformers' own models, for many configurations and every way to schedule them."""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import ConfigError
from hybridrt.layers import linear
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.models.config.read_config import read_model_config
from tests.support.checkpoints import CASES, VOCAB, Checkpoint, CheckpointStore, has_replay
from tests.support.levels import sweep
from tests.support.session import Session, budget, check_sample

STEPS = 64
LENGTHS = (1, 2, 17, 40)
BASES = (
    "falcon-norm_after_gate", "nemotron-experts", "qwen-plain", "falcon_mamba-plain", "jamba-plain", "lfm2-plain",
    "lfm2_moe-plain", "mamba-plain", "mamba2-plain", "swa_ssm-plain", "qwen35-experts", "granite-plain", "olmo-plain",
    "zamba2-two_blocks_adapters_rope", "ling-plain", "minimax-plain",
    "ling25-plain", "lfm3-plain", "gpt_oss-plain", "lara-plain",
)  # fmt: skip
# Rounding does not change which experts run where there are none.
DENSE = (
    "falcon-norm_after_gate", "nemotron-plain", "qwen-dense", "falcon_mamba-plain", "jamba-dense", "lfm2-plain",
    "swa_ssm-plain", "qwen35-seeing_tied", "granite-dense", "bamba-plain", "olmo-no_positions", "lfm3-plain",
)  # fmt: skip


def state_modes(name: str) -> tuple[str, ...]:
    """The modes of plain decoding that a case's recurrent layers have; the last is what a GPU picks."""
    return ("classic", "replay") if has_replay(name) else ("classic",)


def with_modes(names: Sequence[str], every: int = 1, thin: int = 1) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("name", "state_mode"), sweep([(name, mode) for name in names for mode in state_modes(name)], every, thin=thin)
    )


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def requests(*lengths: int, steps: int = STEPS) -> list[tuple[list[int], int]]:
    return [(prompt, steps) for prompt in prompts(*lengths)]


# Of the configurations that the default level leaves out, the slow level compares each second one in whole prompts, and
# the others in chunks.
@pytest.mark.parametrize("name", sweep(CASES, 24, thin=7))
def test_ragged_batch(name: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts of several lengths in one step, whose products end with the residual, then decode steps, whose
    products do not."""
    monkeypatch.setattr(linear.DenseMethod, "adds_from", sum(LENGTHS))
    checkpoint = checkpoints[name]
    session = Session(checkpoint.path, max_model_len=128)
    for sample in session.run(requests(*LENGTHS, steps=24)):
        assert len(sample.tokens) == 24
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize("name", sweep([*CASES][1:] + [*CASES][:1], 36, thin=11))
def test_chunks_mixed_batches_and_retraction(name: str, checkpoints: CheckpointStore) -> None:
    """Arrivals one after the other, chunks of 7 tokens, and KV for one or two requests out of three."""
    checkpoint = checkpoints[name]
    config: dict[str, Any] = {"page_size": 4, "max_model_len": 64, "max_running_requests": 3}
    config["state_mode"] = state_modes(name)[-1]
    model = read_model_config(checkpoint.path)
    windows = {model.attention_of(i).sliding_window for i in model.full_attention_layer_ids}
    window = max(windows) if windows and None not in windows else None  # type: ignore[type-var]
    pages = PageDemand(4, window).least(64) + 1 if window else 17
    session = Session(checkpoint.path, budget_bytes=budget(checkpoint.path, rows=3, pages=pages, **config), **config)
    samples = session.run(requests(*LENGTHS, steps=22), chunk=7, gap=3)
    assert session.num_mixed() > 0
    # So few pages of a window group let requests wait instead, and pages may take the memory of states.
    if len(session.plan.groups) == 1 and session.plan.slabs is None:
        assert sum(sample.retractions for sample in samples) > 0
    for sample in samples:
        check_sample(checkpoint, sample, name)


@with_modes(BASES, 7, thin=3)
def test_single_request(name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints[name]
    session = Session(checkpoint.path, max_running_requests=1, state_mode=state_mode)
    for request in requests(1, 33, steps=24):
        check_sample(checkpoint, session.run([request])[0], name)


@with_modes(("falcon-plain",))
def test_parallel_branches_leave_their_results_side_by_side(
    name: str, state_mode: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of prompts alone and in decode steps, verify steps among them, nothing is copied together."""
    joined: list[bool] = []

    def noting(x: Tensor, tail: Tensor) -> Tensor:
        joined.append((whole := side_by_side(x, tail)).data_ptr() == x.data_ptr())
        return whole

    side_by_side = linear.side_by_side
    monkeypatch.setattr(linear, "side_by_side", noting)
    for speculative in (None, SpeculativeConfig("ngram", num_draft_tokens=2)):
        session = Session(checkpoints[name].path, state_mode=state_mode, speculative=speculative)
        for lengths in ((9, 5), (9,)):
            session.run(requests(*lengths, steps=6))
            assert session.num_mixed() == 0
    assert joined and all(joined)


@pytest.mark.parametrize(
    ("name", "chunk"), sweep([(name, chunk) for name in BASES for chunk in (1, 2, 3, 15, 16, 17, 31, 50)], 41, thin=11)
)
def test_any_chunk_size(name: str, chunk: int, checkpoints: CheckpointStore) -> None:
    """Chunks below, at and above the conv's taps and the scan's own chunk (16 tokens; 64 for the delta rule)."""
    checkpoint = checkpoints[name]
    lengths = (3, 50, 33) if chunk > 3 else (3, 20, 9)  # past the scan's own chunk and what a tap sees
    for sample in Session(checkpoint.path).run(requests(*lengths, steps=6), chunk=chunk, gap=2):
        check_sample(checkpoint, sample, f"{name}, chunks of {chunk}")


@pytest.mark.parametrize("name", sweep(BASES, 3))
def test_prompts_longer_than_every_chunk(name: str, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints[name]
    session = Session(checkpoint.path, max_model_len=256)
    for sample in session.run(requests(200, 130, 64, steps=5)):
        check_sample(checkpoint, sample, name)


@pytest.mark.parametrize("name", sweep(BASES, 11, thin=3))
def test_overlap_and_other_pages_change_nothing(name: str, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints[name]
    asked = requests(*LENGTHS, steps=24)
    wanted = Session(checkpoint.path).run(asked)
    session = Session(checkpoint.path, page_size=1, max_running_requests=2)
    for sample, other in zip(session.run(asked, overlap=True, chunk=20), wanted, strict=True):
        assert sample.tokens == other.tokens
        check_sample(checkpoint, sample, name)


def test_longrope_serves_the_pretraining_length_alone(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match=r"129.* at most 128"):
        Session(checkpoints["falcon-longrope"].path, max_model_len=129)


def rewrite(checkpoint: Path, target: Path, **changes: Any) -> Path:
    """The same weights with other fields in config.json; None removes a field."""
    shutil.copytree(checkpoint, target)
    fields = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return target


KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_KINDS = KINDS | {"M": "mamba", "*": "attention"}
SPELLINGS: dict[str, dict[str, Any]] = {
    "pattern": {"hybrid_override_pattern": "ME*EM", "layers_block_type": None, "layer_types": None},
    "kinds": {"hybrid_override_pattern": None, "layers_block_type": [KINDS[c] for c in "ME*EM"], "layer_types": None},
    "old kinds": {
        "hybrid_override_pattern": None, "layers_block_type": [OLD_KINDS[c] for c in "ME*EM"], "layer_types": None,
    },
    "layer_types": {
        "hybrid_override_pattern": None, "layers_block_type": None, "layer_types": [KINDS[c] for c in "ME*EM"],
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_the_nemotron_pattern(spelling: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = checkpoints["nemotron-experts"]
    path = rewrite(checkpoint.path, tmp_path / "model", num_hidden_layers=None, **SPELLINGS[spelling])
    check_sample(checkpoint, Session(path).run(requests(20, steps=8))[0], spelling)


def test_torch_dtype_is_an_older_name_of_dtype(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = checkpoints["falcon-plain"]
    path = rewrite(checkpoint.path, tmp_path / "model", dtype=None, torch_dtype="bfloat16")
    session = Session(path)
    assert session.runner.model_config.dtype == torch.bfloat16
    check_sample(checkpoint, session.run(requests(9, steps=3))[0], "torch_dtype")


def mean_error(logits: Tensor, oracle: Tensor) -> float:
    """As a share of the oracle's spread."""
    spread = (oracle.max(1).values - oracle.min(1).values)[:, None]
    return float(((logits.float() - oracle) / spread).abs().mean())


@with_modes(DENSE, 7, thin=3)
def test_bfloat16_is_as_near_as_transformers_own(name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    checkpoint = checkpoints[name]
    rounded = Checkpoint(checkpoint.path, copy.deepcopy(checkpoint.model).bfloat16())
    session = Session(checkpoint.path, state_mode=state_mode, dtype="bfloat16")
    pools = session.runner.pools.req_to_token
    cache = pools.mamba2_layer_cache(pools.mamba_pool.layer_ids[0])  # type: ignore[union-attr]  # these have one
    assert (cache.conv.dtype, cache.temporal.dtype) == (torch.bfloat16, torch.float32)
    ours = theirs = 0.0
    for sample in session.run(requests(5, 40, 11, steps=24)):
        oracle = checkpoint.logits(sample.prompt, sample.tokens)
        ours += mean_error(sample.logits, oracle)
        theirs += mean_error(rounded.logits(sample.prompt, sample.tokens), oracle)
    assert 0 < ours < 1.3 * theirs


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-3), ("float16", 4e-4)])
@with_modes(DENSE, 9, thin=5)
def test_rounded_states_stay_near(
    name: str, state_mode: str, dtype: str, tolerance: float, checkpoints: CheckpointStore
) -> None:
    checkpoint = checkpoints[name]
    session = Session(checkpoint.path, state_mode=state_mode, mamba_ssm_dtype=dtype)
    pools = session.runner.pools.req_to_token
    cache = pools.mamba2_layer_cache(pools.mamba_pool.layer_ids[0])  # type: ignore[union-attr]  # these have one
    assert (cache.conv.dtype, cache.temporal.dtype) == (torch.float32, getattr(torch, dtype))
    errors = [
        mean_error(sample.logits, checkpoint.logits(sample.prompt, sample.tokens))
        for sample in session.run(requests(5, 40, steps=24))
    ]
    assert 0 < max(errors) < tolerance, errors
