"""Folds of state rings are spread over steps, and the host counts them as the device makes them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import LLM, SpeculativeConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.core.fold_counts import FoldCounts
from hybridrt.kernels.state.state_ring import advance_ring
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, StepPlan
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

ROWS, SPREAD = 128, 2.5  # folds in a step, at most, as a multiple of the mean


def admission(row: int, tokens: list[int], **params: Any) -> Admission:
    seed = params.pop("seed", 0)
    return Admission.from_prompt(row, row, tokens, SamplingParams(**params), seed)


def folds_of(admissions: list[Admission], steps: int) -> list[int]:
    """Folds of each of `steps` plain decode steps of rows that were admitted together."""
    counts, rows = FoldCounts(len(admissions), 16, 1), [DecodeRow(a.row, 0, 0) for a in admissions]
    found = []
    for i in range(steps):
        plan = StepPlan(admissions=admissions if i == 0 else [], decode=DecodeRows.from_rows(rows))
        found.append(counts.of_step(plan, [1] * len(rows)))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_of_equal_length_fold_in_different_steps(seed: int, sampled: bool) -> None:
    """Different prompts, or one prompt with different seeds."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(0, 50_000, (1 if sampled else ROWS, 200)).repeat(ROWS if sampled else 1, 0).tolist()
    heat = {"temperature": 1.0 if sampled else 0.0}
    folds = folds_of([admission(i + 1, p, seed=i if sampled else 0, **heat) for i, p in enumerate(prompts)], 64)
    assert sum(folds) == 4 * ROWS, "each row folds once in 16 tokens, wherever it began"
    assert max(folds) <= SPREAD * ROWS / 16


def test_the_phase_depends_on_the_request_alone() -> None:
    text = list(range(300))
    phase = admission(3, text, temperature=0.0).phase
    assert phase == admission(9, text, temperature=0.0, seed=5).phase, "a greedy request draws nothing"
    assert phase != admission(3, [*text, 1], temperature=0.0).phase
    assert admission(3, text, seed=1).phase != admission(3, text, seed=2).phase
    again = Admission.from_prompt(4, 4, text, SamplingParams(temperature=0.0), 0, None, [7, 8])
    assert again.phase == phase, "a retracted request comes back with its output"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), tokens=st.sampled_from([1, 2, 5, 8]), num=st.integers(1, 9))
def test_the_host_counts_what_the_device_folds(data: st.DataObject, tokens: int, num: int) -> None:
    """Whatever is accepted: the same count, no ring overflows, and every entry is folded exactly once."""
    width = 16 if tokens == 1 else 32
    counts, rows = FoldCounts(num, width, tokens), torch.arange(1, num + 1).int()
    admissions = [admission(i + 1, [i, data.draw(st.integers(0, 99))]) for i in range(num)]
    start = torch.tensor([0, *(a.phase % (width - tokens + 1) for a in admissions)]).int()
    length, pending = torch.zeros(num + 1).int(), np.zeros(num + 1, int)
    for i in range(data.draw(st.integers(1, 40))):
        accepted = data.draw(st.lists(st.integers(1, tokens), min_size=num, max_size=num))
        plan = StepPlan(
            [] if i else admissions, decode=DecodeRows.from_rows(DecodeRow(r, 0, 0) for r in range(1, num + 1))
        )
        folds = advance_ring(start, length, rows, torch.tensor(accepted).int(), rows, width=width, widest=tokens)
        assert counts.of_step(plan, accepted) == int(folds.count)
        pending[1:] += accepted
        for row, folded in zip(folds.rows.tolist()[: int(folds.count)], folds.length.tolist()):
            assert folded == pending[row]
            pending[row] = 0
        assert length.tolist() == pending.tolist() and int((start + length).max()) + tokens <= width


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_engine_counts_the_folds_of_its_steps(
    drafts: int, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, fold = [], MambaPool._fold
    monkeypatch.setattr(MambaPool, "_fold", lambda pool, folds: (made.append(int(folds.count)), fold(pool, folds))[1])
    speculative = SpeculativeConfig(num_draft_tokens=drafts, state_mode="replay") if drafts else None
    path = str(checkpoints["falcon-plain"].path)
    with LLM(path, device="cpu", state_mode="replay", speculative=speculative, prefix_cache=False) as llm:
        llm.generate([[i, 5, 6, 5, 6] for i in range(6)], greedy(25))
        counters = llm.engine.counters()
    assert counters.folds == sum(made) > 0 and counters.most_folds == max(made)
