"""States within answers on the GPU: histories that leave an answer start from one, and get what they get alone."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.engine.cache import answer_states
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from tests.gpu.rig import DEVICE, GPU, Rows, no_waiting, same_bits
from tests.support.checkpoints import CheckpointStore
from tests.support.ties import check_greedy

pytestmark = GPU
TEXT = [3 + i * 37 % 120 for i in range(70)]
PLAIN = [
    ("falcon-plain", "classic"), ("falcon-plain", "replay"), ("qwen-plain", "classic"), ("qwen-plain", "replay"),
    ("nemotron-plain", "replay"), ("lfm2-plain", "replay"), ("falcon_mamba-plain", "classic"),
]  # fmt: skip
DRAFTED = [("falcon-plain", "intermediate"), ("falcon-plain", "replay"), ("qwen-plain", "replay")]
CUTS = (3, 9, 30, 51)
APART, COUNT, AGAIN = 8, 60, 12


@pytest.mark.parametrize("graphs, overlap", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name, mode, drafts", [*((*model, 0) for model in PLAIN), *((*model, 3) for model in DRAFTED)])
def test_histories_that_leave_an_answer(
    name: str, mode: str, drafts: int, graphs: bool, overlap: bool, checkpoints: CheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Three rows leave their states in the same steps. Histories that keep n tokens of an answer start from the last
    one before. The last text repeats itself, so some drafts are accepted."""
    monkeypatch.setattr(answer_states, "APART", APART)
    speculative = SpeculativeConfig("ngram", num_draft_tokens=drafts, state_mode=mode) if drafts else None
    config: dict[str, Any] = {"speculative": speculative} if speculative else {"state_mode": mode}
    config |= {"max_model_len": 256, "max_running_requests": 4, "page_size": 16, "cache_slots": 60}
    first, again = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (COUNT, AGAIN))
    prompts = [TEXT[:20], TEXT[20:43], [*range(5, 14)] * 3]
    with LLM(
        str(checkpoints[name].path), device=DEVICE, dtype="float32", cuda_graph=graphs, overlap=overlap, **config
    ) as llm:
        answers = [list(out.token_ids) for out in llm.generate(prompts, first)]
        histories = [[*p, *a[:cut], 5 + cut] for cut in CUTS for p, a in zip(prompts, answers, strict=True)]
        outs = llm.generate(histories, again)
    for history, out in zip(histories, outs, strict=True):
        tokens = list(out.token_ids)
        check_greedy(tokens, checkpoints[name].logits(history, tokens), name)
        # A state is at most twice APART after the one before, and a prompt's own up to a page before its end.
        assert len(history) - out.metrics.cached_tokens <= max(2 * APART, 16 + APART) + drafts + 1


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name, mode", PLAIN)
def test_a_step_copies_states_and_waits_for_nothing(
    name: str, mode: str, graphs: bool, checkpoints: CheckpointStore
) -> None:
    """The copies of two of three decode rows are those before the step, bit for bit, and no other slot changes."""
    rows = Rows(checkpoints[name].path, [5, 9, 30], state_mode=mode, cuda_graph=graphs, cache_slots=5)
    pool = rows.runner.pools.req_to_token.mamba_pool
    assert pool is not None
    other, *spare = rows.spare
    copies = (1, spare[0], spare[2]), (3, spare[1], spare[3])  # rows, and slots for their states
    for warm in (False, True):
        rows.decode(1, 2, 3)
        pool.snapshot(torch.tensor([1, 3], device=DEVICE), torch.tensor(spare[2:4], device=DEVICE))
        left = list(pool.read_slot(other, 20))
        copied = [StateMove(row, rows.slots[row - 1], slot, When.BEFORE_ROWS) for row, slot, _ in copies]
        lengths, plan = dict(rows.computed), rows.decode_plan(1, 2, 3)
        plan.moves = copied
        with no_waiting() if warm else nullcontext():
            handle = rows.runner.launch(plan)
        assert len(handle.result().tokens) == 3
        for row, slot, wanted in copies:
            found = zip(pool.read_slot(slot, lengths[row]), pool.read_slot(wanted, lengths[row]), strict=True)
            assert all(same_bits(*pair) for pair in found)
        assert all(same_bits(*pair) for pair in zip(left, pool.read_slot(other, 20), strict=True))
