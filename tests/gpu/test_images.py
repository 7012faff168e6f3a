"""Images on a GPU: towers, positions on three axes in chunks, graphs and verify steps; tokens are transformers'."""

from pathlib import Path
from typing import Any

import pytest

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from tests.gpu.rig import DEVICE, GPU
from tests.models.test_vision import LFM2, LFM3, OMNI, QWEN, QWEN_MOE, seeing
from tests.models.test_vision_text import STEPS, check, run, sample_prompts
from tests.support.checkpoints import CheckpointStore

pytestmark = GPU


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (QWEN, {}),
        (QWEN, {"chunked_prefill_size": 3}),
        (QWEN, {"cuda_graph": False}),
        (QWEN, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)}),
        (QWEN, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3, topk=2)}),
        (QWEN_MOE, {"chunked_prefill_size": 5}),
        (LFM2, {"chunked_prefill_size": 5}),
        (LFM3, {}),
        (OMNI, {"chunked_prefill_size": 5}),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(
    name: str, options: dict[str, Any], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    checkpoint = checkpoints[name]
    path = seeing(checkpoint.path, tmp_path / "model")
    prompts, seen = sample_prompts(path)
    outputs = run(path, prompts, device=DEVICE, dtype="float32", max_running_requests=4, **options)
    for (tokens, _), inputs, output in zip(prompts, seen, outputs, strict=True):
        check(checkpoint.model, name, tokens, inputs, output)


def test_images_come_back_from_main_memory(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = seeing(checkpoints[QWEN].path, tmp_path / "model")
    prompts, _ = sample_prompts(path)
    given: list[Any] = [{"prompt_token_ids": tokens, "spans": spans} for tokens, spans in prompts]
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    options: dict[str, Any] = {
        "encoder_cache_tokens": 6,
        "encoder_host_tokens": 64,
        "prefix_cache": False,
        "max_running_requests": 2,
    }
    with LLM(str(path), device=DEVICE, dtype="float32", max_model_len=96, **options) as llm:
        turns = [[llm.generate(each, params)[0].token_ids for each in given] for _ in range(3)]
        assert turns[0] == turns[1] == turns[2]
        assert llm.engine.counters().encoder_host_hits > 5 and llm.engine.counters().encoded_spans == 5
