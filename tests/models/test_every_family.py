"""What all families do and no other test tries with each of them: a conversation that goes on from its own state."""

from pathlib import Path

import pytest

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.errors import ConfigError, SessionError
from tests.models.test_models_parity import prompts, state_modes
from tests.support.checkpoints import CASES, Checkpoint, CheckpointStore, nemotron, write
from tests.support.levels import sweep
from tests.support.ties import check_greedy

# swa_ssm keeps nothing: its pages leave the window.
FAMILIES = [name for name in CASES if name.endswith("-plain") and name != "swa_ssm-plain"]


@pytest.mark.parametrize("name", sweep(FAMILIES, 8, thin=3))
def test_a_second_turn_begins_behind_the_first(name: str, checkpoints: CheckpointStore) -> None:
    """In the state mode that a GPU picks: what the first turn leaves in a ring is folded, and goes on as a state."""
    checkpoint, params = checkpoints[name], SamplingParams(max_tokens=22, temperature=0.0, ignore_eos=True)
    sizes = {"max_model_len": 96, "max_running_requests": 2, "page_size": 4}
    with LLM(str(checkpoint.path), device="cpu", dtype="float32", state_mode=state_modes(name)[-1], **sizes) as llm:  # type: ignore[arg-type]
        (text,) = prompts(19)
        answer = llm.generate([text], params)[0].token_ids
        turn = [*text, *answer, 5, 6, 7]
        output = llm.generate([turn], params)[0]
    assert output.metrics.cached_tokens == len(text) + len(answer) - 1
    check_greedy(answer, checkpoint.logits(text, answer), name)
    check_greedy(output.token_ids, checkpoint.logits(turn, output.token_ids), name)


@pytest.mark.parametrize("topk", [0, 2], ids=["plain", "trees"])
def test_a_model_without_anything_to_keep(topk: int, tmp_path: Path) -> None:
    """Neither attention nor recurrent layers: there is no prefix to cache, and each token depends on the last alone."""
    checkpoint = Checkpoint(tmp_path, write(nemotron("E-"), tmp_path))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    drafts = SpeculativeConfig("ngram", num_draft_tokens=4, topk=topk) if topk else None
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=64, speculative=drafts) as llm:
        (text,) = prompts(40)
        for _ in range(2):
            output = llm.generate([text], params)[0]
            assert output.metrics.cached_tokens == 0
            check_greedy(output.token_ids, checkpoint.logits(text, output.token_ids), "E-")
        with pytest.raises(SessionError, match="in the prefix cache"):
            llm.save_session(tmp_path / "session.safetensors", text)
    with pytest.raises(ConfigError, match="host_cache_bytes has no use here"):
        LLM(str(tmp_path), device="cpu", host_cache_bytes=2**22)
