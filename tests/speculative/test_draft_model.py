"""The draft model's own steps."""

from pathlib import Path

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.runtime.step import pack_padded as prompt_columns
from hybridrt.runtime.step.pack_padded import PROMPT_ROWS
from hybridrt.runtime.step.plan import StepPlan
from hybridrt.speculative.draft_model import DraftModelDrafter
from tests.speculative.test_schedules import Rigs
from tests.support.checkpoints import VOCAB
from tests.support.prompt_steps import capture_prompts
from tests.support.speculation import Rig

ROWS = PROMPT_ROWS + 2


def test_more_rows_than_a_graph_holds_catch_up_in_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's prompts of many requests run as graphs, and the requests give the same tokens as without."""
    monkeypatch.setattr(prompt_columns, "TOKENS_OF_ONE", 6)  # small buckets have room for as many prompts
    rigs = Rigs(tmp_path)
    other = str(rigs.path("mamba2", 1))
    rig = Rig(rigs.path("mamba2"), drafts=3, rows=ROWS, method="draft", draft_model=other)
    drafter = DraftModelDrafter(rig.config, rig.runner.memory_plan, VOCAB)
    runner = drafter.runner
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)

    def answers() -> dict[str, list[int]]:
        engine, found = rig.engine(drafter), dict[str, list[int]]()
        for i in range(ROWS):
            engine.add_request([i, 3, 5, 7 * i % 11], params, str(i))
        while engine.has_unfinished():
            for delta in engine.step():
                assert delta.error is None
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
        return found

    wanted = answers()
    graphs = capture_prompts(runner, ((0,), (48,)), saves=False)
    replayed, launched, launch = list[int](), list[StepPlan](), runner.launch
    replay = graphs.replay
    runner.launch = lambda plan: launched.append(plan) or launch(plan)  # type: ignore[method-assign, func-returns-value]
    graphs.replay = lambda plan, bucket: replayed.append(len(plan.extend)) or replay(plan, bucket)  # type: ignore[method-assign, func-returns-value]
    assert answers() == wanted
    assert replayed[:2] == [PROMPT_ROWS, 2] and len(replayed) == sum(bool(plan.extend) for plan in launched)
