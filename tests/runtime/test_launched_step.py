"""The handle of a launched step: what it waits for, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import EngineError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.runtime.run.launched_step import MaskedLines
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, ExtendRow, StepPlan
from tests.support.prefilled import PROMPTS, prefilled
from tests.support.tiny import write_tiny


def make_runner(path: Path, drafts: int = 0) -> ModelRunner:
    config = EngineConfig(
        str(path), device="cpu", load_format="dummy", max_model_len=32, max_running_requests=4, page_size=4,
        speculative=SpeculativeConfig("ngram", num_draft_tokens=drafts) if drafts else None,
    )  # fmt: skip
    return prefilled(config)


def decode(constrained: tuple[int, ...], drafts: int = 0) -> StepPlan:
    rows = [DecodeRow(row, len(prompt), 1, [3] * drafts) for row, prompt in enumerate(PROMPTS, 1)]
    return StepPlan(decode=DecodeRows.from_rows(rows), constrained=list(constrained))


def masks_for(runner: ModelRunner, lines: int, token: int = 7) -> np.ndarray:
    """Allow one token."""
    masks = np.zeros((lines, -(-runner.model_config.vocab_size // 32)), np.int32)
    masks[:, token // 32] = 1 << token % 32
    return masks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), tokenizer=False)


def tensors(runner: ModelRunner) -> list[torch.Tensor]:
    """All that a launch may change."""
    pool = runner.pools.req_to_token.mamba_pool
    assert pool is not None
    kv = [t for layer in runner.pools.kv.specs for t in runner.pools.kv.layer_tensors(layer)]
    states = [part for slot in range(1, 5) for part in pool.read_slot(slot, 3)]
    return [t.clone() for t in (runner.last_tokens, runner.pools.req_to_token.req_to_token, *kv, *states)]


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_forgotten_handle_is_an_error_that_changes_nothing(path: Path, drafts: int) -> None:
    runner, other = make_runner(path, drafts), make_runner(path, drafts)
    step, same = (r.launch(decode((0, 2), drafts)) for r in (runner, other))
    before, admitted = tensors(runner), Admission.from_prompt(1, 1, [2], SamplingParams(logprobs=3), 9)
    for _ in range(2):
        with pytest.raises(EngineError, match="has not sampled: give its handle the masks"):
            runner.launch(
                StepPlan([admitted], extend=[ExtendRow(1, 0, [2], 0, True)], moves=[StateMove(2, 2, 2, When.FIRST)])
            )
    assert all(map(torch.equal, tensors(runner), before)) and step.needs_masks
    for each, of in ((step, runner), (same, other)):
        each.sample(masks_for(of, 2 * (1 + drafts)))
    assert step.result() == same.result() and step.result().tokens[0][0] == 7
    assert step.result().logprobs == [None] * 3  # those of the admission that was refused are not wanted
    assert all(map(torch.equal, tensors(runner), tensors(other)))


@pytest.mark.parametrize("constrained", [(1,), (0, 1, 2)])
def test_masks_of_another_shape_are_refused_and_the_step_still_waits(path: Path, constrained: tuple[int, ...]) -> None:
    runner, lines = make_runner(path), len(constrained)
    step, good = runner.launch(decode(constrained)), masks_for(runner, lines)
    words = good.shape[1]
    for bad in (
        masks_for(runner, lines + 1), good[:-1], good[:, :-1], np.zeros((lines, words + 1), np.int32),
        good.astype(np.int64), good[0],
    ):  # fmt: skip
        with pytest.raises(EngineError, match=rf"{lines} constrained lines: give int32 masks \({lines}, {words}\)"):
            step.sample(bad)
        with pytest.raises(EngineError, match="give it its masks first"):
            step.result()
    step.sample(good)
    tokens = step.result().tokens
    assert all(tokens[i] == [7] for i in constrained)
    with pytest.raises(EngineError, match="waits for none"):
        step.sample(good)
    assert step.result().tokens == tokens


def test_a_step_that_is_given_up_is_followed_by_others(path: Path) -> None:
    runner = make_runner(path, drafts=2)
    step = runner.launch(decode((0,), drafts=2))
    step.drop()
    step.drop()
    for what in (step.result, lambda: step.sample(masks_for(runner, 3))):
        with pytest.raises(EngineError, match="dropped"):
            what()
    plain = runner.launch(decode((), drafts=2))
    plain.drop()
    assert not plain.needs_masks and len(plain.result().tokens) == 3


def test_a_sampling_that_fails_leaves_no_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(path, drafts=2)
    step = runner.launch(decode((0,), drafts=2))
    with monkeypatch.context() as broken:
        broken.setattr(type(runner.sampler), "verify", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.sample(masks_for(runner, 3))
    with pytest.raises(EngineError, match="its sampling failed"):
        step.result()
    assert len(runner.launch(decode((), drafts=2)).result().tokens) == 3


def test_which_lines_have_masks() -> None:
    """Of decode rows the input and the drafts, not the padding; of prompts the last token."""
    decode = DecodeRows.from_rows([DecodeRow(1, 4, 1, [3]), DecodeRow(2, 4, 1, [3, 3])])
    extend = [ExtendRow(3, 0, [1], 0, True), ExtendRow(4, 0, [1], 0, False), ExtendRow(5, 0, [1], 0, True)]
    lines, total = MaskedLines.from_plan(StepPlan(decode=decode, extend=extend, constrained=[0, 3]), 3)
    assert lines.tolist() == [0, 1, 7] and total == 8
