"""Engines on a CPU whose recurrent and attention layers run the Triton kernels, interpreted: logits are transformers'.

Tests of kernels choose their arguments. Here they are those that an engine makes: chunks that end where a state is
saved, rows that begin at a cached state, prompts next to rows that decode.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridrt.kernels
from hybridrt.kernels.attention import paged_attention_triton
from hybridrt.kernels.core import providers
from hybridrt.kernels.mamba import mamba2_scan_triton
from hybridrt.runtime.step import pack_padded as prompt_columns
from hybridrt.runtime.step.pack_padded import Bucket
from hybridrt.runtime.step.plan import StepPlan
from tests.support.checkpoints import Checkpoint, CheckpointStore, has_replay
from tests.support.prompt_steps import capture_prompts
from tests.support.session import Sample, Session, check_sample, greedy

# The text leaves a state at 192. Its second step begins at 100: chunks of 128 tokens end at 128, at 192 and at 200. So
# the state is that after neither the step's first chunk nor its last one.
TEXT, CHUNK = [3 + i * 37 % 120 for i in range(136)], 70
# Step, prompt, and tokens to generate: two that come while the first one decodes, then one after the second's state.
ARRIVALS = ((0, TEXT, 6), (3, [*TEXT[:132], 3, 4], 3), (3, [9], 3), (4, [*TEXT[:131], 5, 6, 7], 2))
# A checkpoint for each kind of layer and of attention: the smallest that has it. The first one runs by default, and one
# with a delta rule and attention in the slow level, where tests below have Mamba-2 and lightning attention.
NAMES = (
    "falcon_mamba-plain", "minimax-lightning_alone", "bamba-mamba_alone", "olmo-attention_first", "kimi-dense_alone",
    "lfm2-plain", "swa_ssm-plain", "ling25-plain", "gpt_oss-odd_sizes",
)  # fmt: skip
SLOW = "olmo-attention_first"
# Files of kernels whose tokens know nothing of each other: tests of kernels alone have all that engines ask of them.
OF_TOKENS = (
    "gated_norm", "moe", "moe_router", "norm_activation", "sampling", "sampling_filters", "skinny_linear",
    "token_rules",
)  # fmt: skip


@pytest.fixture
def kernels(provider: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the Triton kernels but for those OF_TOKENS, which the interpreter would spend most of its time on. Decode
    attention shares contexts among the programs of a small GPU: of a large one's most have nothing to do."""
    found = {file.stem.removesuffix("_triton") for file in Path(hybridrt.kernels.__path__[0]).rglob("*_triton.py")}
    assert found.issuperset(OF_TOKENS), "a file has another name now"

    def chosen() -> dict[str, str]:
        targets = {op: by["triton"].target or "" for op, by in providers._IMPLEMENTATIONS.items() if "triton" in by}
        files = {op: target.split(":")[0].split(".")[-1].removesuffix("_triton") for op, target in targets.items()}
        return {op: "triton" for op, file in files.items() if file not in OF_TOKENS}

    monkeypatch.setattr(providers, "_overrides", chosen)
    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: 12)
    providers.select.cache_clear()
    yield


def session_of(checkpoint: Checkpoint) -> Session:
    mode = "replay" if has_replay(checkpoint.path.name) else "classic"
    config: dict[str, Any] = {"state_mode": mode, "cache_slots": 4, "attention_backend": "triton"}
    session = Session(checkpoint.path, page_size=16, max_model_len=256, **config)
    # Pages after a cached state that are out of a window are never entered; the checks of eager steps look at them.
    session.runner.pools.req_to_token.req_to_token.clamp_(min=0)
    return session


def check(session: Session, checkpoint: Checkpoint) -> None:
    """Runs all arrivals on an engine with a prefix cache."""
    engine, step = session.engine(chunk=CHUNK, prefix_cache=True), 0
    samples, cached = [Sample(prompt) for _, prompt, _ in ARRIVALS], dict[str, int]()
    while step < 8 or engine.has_unfinished():
        for i, (arrival, prompt, count) in enumerate(ARRIVALS):
            if arrival == step:
                engine.add_request(prompt, greedy(count, seed=i), str(i))
        for out in engine.step() if engine.has_unfinished() else ():
            assert out.error is None, out.error
            samples[int(out.request_id)].tokens += out.token_ids
            if out.metrics is not None:
                cached[out.request_id] = out.metrics.cached_tokens
        step += 1
    assert cached == {"0": 0, "1": 128, "2": 0, "3": 128} and session.num_mixed()
    for i, sample in enumerate(samples):
        sample.logits = torch.stack([session.logits[i, k] for k in range(len(sample.tokens))])
        check_sample(checkpoint, sample, checkpoint.path.name)


@pytest.mark.parametrize("provider", ["triton-shuffled"], indirect=True)
@pytest.mark.parametrize("name", [
    NAMES[0], pytest.param(SLOW, marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.soak) for name in NAMES[1:] if name != SLOW),
])  # fmt: skip
def test_prompts_that_leave_and_find_states(name: str, kernels: None, checkpoints: CheckpointStore) -> None:
    check(session_of(checkpoints[name]), checkpoints[name])


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["triton-shuffled"], indirect=True)
def test_they_leave_states_in_a_scan_of_many_tokens(
    kernels: None, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba-2 has other kernels for them."""
    monkeypatch.setattr(mamba2_scan_triton, "FEW_TOKENS", 0)
    checkpoint = checkpoints["bamba-mamba_alone"]
    check(session_of(checkpoint), checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["triton-shuffled"], indirect=True)
@pytest.mark.parametrize("name", [
    "minimax-lightning_alone",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("falcon_mamba-plain", "olmo-attention_first")),
])  # fmt: skip
def test_they_leave_states_in_graphs(
    name: str, kernels: None, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are padded, and the host knows bounds of them alone."""
    monkeypatch.setattr(prompt_columns, "TOKENS_OF_ONE", CHUNK // 4)
    session = session_of(checkpoints[name])
    graphs = capture_prompts(session.runner, ((3,), (CHUNK,)), saves=True, exact_lens=False)
    replayed, replay = list[StepPlan](), graphs.replay

    def noted(plan: StepPlan, bucket: Bucket) -> Any:
        replayed.append(plan)
        return replay(plan, bucket)

    graphs.replay = noted  # type: ignore[method-assign]
    check(session, checkpoints[name])
    assert any(row.saves for plan in replayed for row in plan.extend)
    assert len(replayed) == sum(bool(plan.extend) for plan in session.plans)
