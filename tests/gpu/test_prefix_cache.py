"""Turns that start from cached prefixes on the GPU, with graphs and overlap: the same greedy tokens, in float32."""

from typing import Any

import pytest

from hybridrt import LLM, SamplingParams
from tests.gpu.rig import DEVICE, GPU
from tests.support.checkpoints import CheckpointStore
from tests.support.ties import check_greedy

pytestmark = GPU
TEXT = [3 + i * 37 % 120 for i in range(70)]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "name", ["falcon-plain", "qwen-plain", "falcon_mamba-plain", "nemotron-plain", "lfm2-plain", "swa_ssm-plain"]
)
def test_turns_that_hit(name: str, page_size: int, checkpoints: CheckpointStore) -> None:
    """A turn, the next one, and two at once that leave the first one's prompt where it has a state."""
    path, count = checkpoints[name].path, 12
    greedy = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    shape: dict[str, Any] = {"max_model_len": 128, "max_running_requests": 3, "page_size": page_size}
    with LLM(str(path), device=DEVICE, dtype="float32", cache_slots=6, **shape) as llm:
        (first,) = llm.generate([TEXT], greedy)
        prompts = [[*TEXT, *first.token_ids, 9, 8], [*TEXT[:66], 3, 4], [*TEXT[:65], 5, 6, 7]]
        outs = [*llm.generate(prompts[:1], greedy), *llm.generate(prompts[1:], greedy)]
    assert [out.metrics.cached_tokens for out in outs] == [len(TEXT) + count - 1, 64, 64]
    for prompt, out in zip(prompts, outs, strict=True):
        tokens = list(out.token_ids)
        check_greedy(tokens, checkpoints[name].logits(prompt, tokens), name)
