"""Launching a step never waits for the device."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import SamplingParams, SpeculativeConfig
from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.run.launched_step import MaskedLines
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, ExtendRow, StepPlan
from tests.gpu.rig import FAMILIES, PRODUCTION, Rows, no_waiting, sleep
from tests.support.checkpoints import CheckpointStore
from tests.support.mtp_oracle import HEADS, write_with_head

pytestmark = PRODUCTION
ALL_FILTERS = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.1, logprobs=2
)
DRAFTS = 3
Plan = Callable[[Rows], StepPlan]


def decode(rows: Rows) -> StepPlan:
    return rows.decode_plan(1, 3, 2, 5, 4)


def mixed(rows: Rows) -> StepPlan:
    """Decode rows, a last chunk that samples, and a new prompt's first chunk."""
    plan = rows.decode_plan(4, 2)
    prompts = {row: rows.prompt(20) for row in (6, 7)}
    plan.admissions = [Admission.from_prompt(r, rows.slots[r - 1], p, ALL_FILTERS, r) for r, p in prompts.items()]
    plan.page_writes = [rows.page_write(row) for row in prompts]
    plan.extend = [ExtendRow(6, 0, prompts[6], 0, True), ExtendRow(7, 0, prompts[7][:9], 0, False)]
    return plan


def verify(rows: Rows) -> StepPlan:
    """Rows with all drafts, with some and without; the next step starts after whatever is accepted, or before."""
    counts = {1: DRAFTS, 2: 1, 5: 0}
    return StepPlan(
        decode=DecodeRows.from_rows(DecodeRow(r, rows.computed[r], 9, rows.prompt(n)) for r, n in counts.items())
    )


def warm_rows(checkpoints: CheckpointStore, name: str, plan: Plan, **config: Any) -> Rows:
    """Rows that have been through such steps: kernels are compiled, pinned memory is there."""
    rows = Rows(checkpoints[name].path, [5, 9, 1, 30, 17, 3, 8], **config)
    rows.admit(2, 9, ALL_FILTERS)
    for _ in range(3):
        rows.runner.launch(plan(rows)).result()
    return rows


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("plan", [decode, mixed])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_synchronisation(name: str, plan: Plan, graphs: bool, checkpoints: CheckpointStore) -> None:
    rows = warm_rows(checkpoints, name, plan, cuda_graph=graphs)
    for _ in range(20):
        step = plan(rows)
        with no_waiting():
            handle = rows.runner.launch(step)
        assert len(handle.result().tokens) == len(step.decode) + sum(row.sample for row in step.extend)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("plan", [decode, mixed, verify])
def test_no_synchronisation_under_masks(plan: Plan, graphs: bool, checkpoints: CheckpointStore) -> None:
    """Two rows may draw token 7 alone."""
    speculative = SpeculativeConfig(num_draft_tokens=DRAFTS) if plan is verify else None
    rows = warm_rows(checkpoints, next(iter(FAMILIES)), plan, cuda_graph=graphs, speculative=speculative)
    words = -(-rows.runner.model_config.vocab_size // 32)
    for warm in (False, True, True, True):
        step = plan(rows)
        step.constrained = [0, 2]
        lines, _ = MaskedLines.from_plan(step, 1 + DRAFTS if plan is verify else 1)
        masks = np.zeros((len(lines), words), np.int32)
        masks[:, 0] = 1 << 7
        with no_waiting() if warm else nullcontext():
            handle = rows.runner.launch(step)
            handle.sample(masks)
        tokens = handle.result().tokens
        assert all(set(tokens[i]) == {7} for i in step.constrained)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("state_mode", ["intermediate", "replay"])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_synchronisation_in_a_verify_step(
    name: str, state_mode: str, graphs: bool, checkpoints: CheckpointStore
) -> None:
    speculative = SpeculativeConfig(num_draft_tokens=DRAFTS, state_mode=state_mode)
    rows = warm_rows(checkpoints, name, verify, speculative=speculative, cuda_graph=graphs)
    for _ in range(5):
        step = verify(rows)
        with no_waiting():
            handle = rows.runner.launch(step)
        for drafts, tokens in zip(step.decode.num_drafts.tolist(), handle.result().tokens, strict=True):
            assert 1 <= len(tokens) <= 1 + drafts


@pytest.mark.parametrize("graphs", [True, False])
def test_no_synchronisation_behind_a_prediction_head(graphs: bool, tmp_path: Path) -> None:
    """Neither where it follows a step nor where it drafts, until its drafts are read."""
    write_with_head(HEADS["qwen"], tmp_path)
    speculative = SpeculativeConfig("mtp", num_draft_tokens=DRAFTS)
    rows = Rows(tmp_path, [5, 9, 1, 30, 17, 3, 8], speculative=speculative, cuda_graph=graphs)
    rows.admit(2, 9, ALL_FILTERS)
    head = rows.runner.drafter
    assert head is not None
    asking = [DraftRow(r, rows.computed[r], rows.computed[r] // 4 + 1, 9, ALL_FILTERS) for r in (1, 2, 5)]
    for i in range(8):
        plans = [verify(rows), mixed(rows)]
        with no_waiting() if i > 2 else nullcontext():
            handles = [rows.runner.launch(plan) for plan in plans]
            drafts = head.draft(asking, DRAFTS)
        assert [len(tokens) for tokens in drafts.result().tokens] == [2 * DRAFTS] * 3
        for handle in handles:
            handle.result()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("plan", [decode, mixed])
def test_two_steps_are_launched_while_the_device_sleeps(plan: Plan, graphs: bool, checkpoints: CheckpointStore) -> None:
    """Waits that torch does not know of would let the sleep end first."""
    rows = warm_rows(checkpoints, FAMILIES[0], plan, cuda_graph=graphs, max_model_len=200)
    first, second = plan(rows), plan(rows)
    asleep = torch.cuda.Event()
    torch.cuda.synchronize()
    sleep(2_000_000_000)  # a second
    asleep.record()
    handles = [rows.runner.launch(first), rows.runner.launch(second)]
    assert not asleep.query()
    assert not any(handle.ready() for handle in handles)
    for handle in handles:
        handle.result()
    assert asleep.query()


def test_the_guard_detects_a_wait(checkpoints: CheckpointStore) -> None:
    rows = warm_rows(checkpoints, FAMILIES[0], decode)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        rows.runner.last_tokens.tolist()
