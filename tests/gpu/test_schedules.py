"""However a request is scheduled, its logits and tokens are the same."""

from typing import Any

import pytest

from hybridrt import LLM, SamplingParams
from tests.gpu.rig import DEVICE, FAMILIES, GPU, STATE_MODES, GpuSession
from tests.models.test_models_parity import prompts, requests
from tests.support.checkpoints import CheckpointStore
from tests.support.session import Sample

pytestmark = GPU
LENGTHS = (33, 1, 70, 9, 50, 2)
WORK = requests(*LENGTHS, steps=40)
MAX_SLEEP = 6_000_000  # about 3 ms, several steps' worth


def assert_alike(samples: list[Sample], others: list[Sample]) -> None:
    """The same tokens, from logits that rounding alone separates."""
    assert len(samples) == len(others)
    for sample, other in zip(samples, others, strict=True):
        assert sample.tokens == other.tokens
        assert (sample.logits - other.logits).abs().max().item() <= 2e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("state_mode", STATE_MODES)
class TestSchedules:
    def test_chunked_prefill_is_whole_prefill(self, name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
        session = GpuSession(checkpoints[name].path, state_mode=state_mode)
        whole = session.run(WORK)
        for chunk in (1, 16, 45):
            assert_alike(session.run(WORK, chunk=chunk), whole)

    def test_mixed_steps_are_separate_ones(self, name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
        """Prompts that arrive while others decode, as one eager step and as a replay with the prompt after it."""
        path = checkpoints[name].path
        alone = [GpuSession(path, state_mode=state_mode, max_running_requests=1).run([work])[0] for work in WORK]
        for graphs in (True, False):
            session = GpuSession(path, state_mode=state_mode, cuda_graph=graphs, max_running_requests=6)
            assert_alike(session.run(WORK, chunk=20, gap=5), alone)
            assert session.num_mixed() > 5

    def test_overlap_changes_nothing(self, name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
        """While the device sleeps, the host runs ahead: what it overwrites too early, or reads too early, shows."""
        wanted = GpuSession(checkpoints[name].path, state_mode=state_mode).run(WORK, chunk=30, gap=2)
        for graphs in (True, False):
            session = GpuSession(checkpoints[name].path, state_mode=state_mode, max_sleep=MAX_SLEEP, cuda_graph=graphs)
            assert_alike(session.run(WORK, chunk=30, gap=2, overlap=True), wanted)


SAMPLED = [
    SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=0.7, top_k=20, top_p=0.9, seed=6),
    SamplingParams(max_tokens=40, temperature=1.3, min_p=0.05, frequency_penalty=0.5, seed=7, stop_token_ids=(9, 40)),
    SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3),
    SamplingParams(max_tokens=12, temperature=0.9, seed=8, n=3),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_depend_on_seeds_alone(name: str, checkpoints: CheckpointStore) -> None:
    """Sampled requests together with overlap, and each alone without it."""
    batch = prompts(*LENGTHS[: len(SAMPLED)])
    common: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "max_model_len": 128}
    together = LLM(str(checkpoints[name].path), **common, max_running_requests=4, chunked_prefill_size=24)
    alone = LLM(str(checkpoints[name].path), **common, max_running_requests=1, overlap=False, cuda_graph=False)
    for out, prompt, params in zip(together.generate(batch, SAMPLED), batch, SAMPLED, strict=True):
        (single,) = alone.generate([prompt], params)
        assert [o.token_ids for o in out.outputs] == [o.token_ids for o in single.outputs]
        assert [o.finish_reason for o in out.outputs] == [o.finish_reason for o in single.outputs]
