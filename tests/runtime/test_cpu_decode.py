"""Plain decode steps of a CPU, whose tensors are kept, against eager steps."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.runtime.replay import cpu_steps
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.runtime.step.plan import Admission, DecodeRow, DecodeRows, ExtendRow, PageWrite, StepPlan
from tests.support.page_sets import page_sets
from tests.support.tiny import write_tiny

PROMPTS = ([5, 6, 7], [9, 8, 7, 6, 5], [11])


def prefilled(path: Path, mode: str) -> ModelRunner:
    config = EngineConfig(
        str(path), device="cpu", load_format="dummy", max_model_len=32, max_running_requests=4, page_size=4,
        state_mode=mode,
    )  # fmt: skip
    made, rows = ModelRunner(config), list(enumerate(PROMPTS, 1))
    params = [SamplingParams(temperature=float(row == 2)) for row, _ in rows]
    plan = StepPlan(
        [Admission.from_prompt(row, row, prompt, params[row - 1], row) for row, prompt in rows],
        [PageWrite(row, 0, page_sets([2 * row - 1, 2 * row])) for row, _ in rows],
        extend=[ExtendRow(row, 0, prompt, 0, True) for row, prompt in rows],
    )
    made.launch(plan).result()
    return made


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_equal_eager_steps(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order and number, pages that are new, logits that were not finite, recorded steps: the same tokens,
    and the same state bit by bit."""
    monkeypatch.setattr(cpu_steps, "RECORDS_AFTER", 1)
    path = write_tiny(tmp_path, tokenizer=False)
    kept, eager = prefilled(path, mode), prefilled(path, mode)
    eager._cpu_decode = None
    for runner in (kept, eager):
        runner.last_tokens[3] = -1
    computed = {row: len(prompt) for row, prompt in enumerate(PROMPTS, 1)}
    for rows in ([1, 2, 3], [3, 1], [2, 3, 1], *[[1]] * 4, [1, 2, 3]):
        decode = DecodeRows.from_rows(DecodeRow(row, computed[row], computed[row]) for row in rows)
        pages = [PageWrite(row, 2, page_sets([6 + row])) for row in rows if computed[row] == 8]
        plan = StepPlan(page_writes=pages, decode=decode)
        expected = eager.launch(plan).result().tokens
        with monkeypatch.context() as patched:
            patched.setattr(StepRunner, "_run_eager", None)
            assert kept.launch(plan).result().tokens == expected
        computed |= {row: computed[row] + 1 for row in rows}
    assert max(computed.values()) > 8  # a page was new
    assert len(kept.recordings._kept) == 1  # of the row alone
    assert torch.equal(kept.last_tokens, eager.last_tokens)
    pools = [runner.pools.req_to_token.mamba_pool for runner in (kept, eager)]
    assert pools[0] is not None and pools[1] is not None
    for (_, ours), (_, theirs) in zip(pools[0].stacks, pools[1].stacks, strict=True):
        assert torch.equal(ours.temporal, theirs.temporal) and torch.equal(ours.conv, theirs.conv)
    assert torch.equal(pools[0].ring_length, pools[1].ring_length)


def test_keys_of_recordings(tmp_path: Path) -> None:
    """A row alone has one if its conv rings are full: its state slot."""
    steps = prefilled(write_tiny(tmp_path, tokenizer=False), "classic")._cpu_decode
    assert steps is not None

    def key(rows: Sequence[int], computed: int) -> int | None:
        return steps.recorded_slot(DecodeRows.from_rows(DecodeRow(row, computed, 0) for row in rows))

    assert key([1], 3) is key([1, 2], 4) is None
    assert key([1], 4) == key([1], 7) == 1 and key([2], 4) == 2
