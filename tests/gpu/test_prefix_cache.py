"""Turns that start from cached prefixes on the GPU, with graphs and overlap: the same greedy tokens, in float32."""

import random
from typing import Any

import pytest

from hybridrt import LLM, SamplingParams
from tests.gpu.rig import DEVICE, FAMILIES, GPU, LATENT, MAMBA1, NEWER, SHORT_CONV
from tests.support.checkpoints import CheckpointStore
from tests.support.ties import check_greedy

pytestmark = GPU
TEXT = [3 + i * 37 % 120 for i in range(200)]  # it leaves a state at 192: within a chunk of 128 that is not its first


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "name",
    [
        "falcon-plain", "qwen-plain", "falcon_mamba-plain", "nemotron-plain", "lfm2-plain", "swa_ssm-plain",
        "minimax-plain",
    ],
)  # fmt: skip
def test_turns_that_hit(name: str, page_size: int, checkpoints: CheckpointStore) -> None:
    """A turn, the next one, and two at once that leave the first one's prompt where it has a state."""
    path, count = checkpoints[name].path, 12
    greedy = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    shape: dict[str, Any] = {"max_model_len": 256, "max_running_requests": 3, "page_size": page_size}
    with LLM(str(path), device=DEVICE, dtype="float32", cache_slots=6, **shape) as llm:
        (first,) = llm.generate([TEXT], greedy)
        prompts = [[*TEXT, *first.token_ids, 9, 8], [*TEXT[:196], 3, 4], [*TEXT[:195], 5, 6, 7]]
        outs = [*llm.generate(prompts[:1], greedy), *llm.generate(prompts[1:], greedy)]
    assert [out.metrics.cached_tokens for out in outs] == [len(TEXT) + count - 1, 192, 192]
    for prompt, out in zip(prompts, outs, strict=True):
        tokens = list(out.token_ids)
        check_greedy(tokens, checkpoints[name].logits(prompt, tokens), name)


# What the first of the newer ones answers may stand for an image, which no prompt may hold.
@pytest.mark.parametrize("name", [*FAMILIES, *MAMBA1, *NEWER[1:], *SHORT_CONV, *LATENT])
def test_texts_that_leave_others_anywhere(name: str, checkpoints: CheckpointStore) -> None:
    """Prompts of several chunks, most of which begin like an earlier text, together, with few slots for states."""
    draw, count = random.Random(name), 12
    greedy = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    shape: dict[str, Any] = {"max_model_len": 256, "max_running_requests": 4, "chunked_prefill_size": 200}
    texts, cached = list[list[int]](), 0
    with LLM(str(checkpoints[name].path), device=DEVICE, dtype="float32", cache_slots=8, **shape) as llm:
        for _ in range(5):
            prompts = [_next_text(draw, texts) for _ in range(4)]
            outs = llm.generate(prompts, greedy)
            cached += sum(out.metrics.cached_tokens for out in outs)
            for prompt, out in zip(prompts, outs, strict=True):
                tokens = list(out.token_ids)
                check_greedy(tokens, checkpoints[name].logits(prompt, tokens), name)
                texts.append([*prompt, *tokens])
    assert cached


def _next_text(draw: random.Random, texts: list[list[int]]) -> list[int]:
    """Mostly an earlier text or a beginning of one, with new tokens after it."""
    earlier = draw.choice(texts) if texts and draw.random() < 0.75 else []
    kept = earlier[: draw.choice((len(earlier), draw.randint(0, len(earlier))))][:200]
    return [*kept, *(draw.randrange(3, 120) for _ in range(draw.randint(1, 40) if kept else draw.randint(60, 200)))]
