"""Embeddings as prompts: those of the model's own table give the tokens of its token ids."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import LLM, AsyncLLM, SamplingParams
from hybridrt.base.errors import RequestError
from tests.models.test_vision import QWEN, seeing
from tests.models.test_vision_text import sample_prompts
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

TEXTS = [[5, 6, 7, 8, 9, 10, 11], [9] * 20, [11, 4, 3, 8]]


def load(path: Path, **options: Any) -> LLM:
    given = {"device": "cpu", "max_model_len": 96, "max_running_requests": 3, "page_size": 4, "prompt_embeds": True}
    return LLM(str(path), **given | options)


def table(llm: LLM) -> torch.Tensor:
    weights: torch.Tensor = llm.engine.executor.model.embed.weight.detach()
    return weights.clone()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("falcon-plain", {}),
        ("falcon-plain", {"chunked_prefill_size": 5, "encoder_cache_tokens": 24, "encoder_host_tokens": 30}),
        pytest.param("falcon-split", {"tp_size": 2, "chunked_prefill_size": 5}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_ids(name: str, options: dict[str, Any], checkpoints: CheckpointStore) -> None:
    with load(checkpoints[name].path) as llm:
        wanted, rows = [output.token_ids for output in llm.generate(TEXTS, greedy(6))], table(llm)
    given: list[Any] = [{"prompt_embeds": rows[torch.tensor(ids)]} for ids in TEXTS]
    with load(checkpoints[name].path, **options) as llm:
        outputs = llm.generate(given, greedy(6))
        assert [output.token_ids for output in outputs] == wanted
        assert llm.generate(given[0], greedy(6))[0].token_ids == wanted[0]
        mixed = llm.generate([given[1], TEXTS[0]], greedy(6))
        assert [output.token_ids for output in mixed] == [wanted[1], wanted[0]]


def test_a_model_that_sees_takes_them_next_to_images(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = seeing(checkpoints[QWEN].path, tmp_path / "model")
    images: list[Any] = [{"prompt_token_ids": ids, "spans": spans} for ids, spans in sample_prompts(path)[0]]
    with load(path) as llm:
        wanted = [output.token_ids for output in llm.generate([*images, TEXTS[0]], greedy(6))]
        embeddings = {"prompt_embeds": table(llm)[torch.tensor(TEXTS[0])].numpy()}
        assert [output.token_ids for output in llm.generate([*images, embeddings], greedy(6))] == wanted


def test_the_cache_tells_them_apart(checkpoints: CheckpointStore) -> None:
    with load(checkpoints["falcon-plain"].path) as llm:
        rows = table(llm)[torch.tensor(TEXTS[1])]
        first, second = (llm.generate({"prompt_embeds": rows + i}, greedy(2))[0] for i in (0, 1))
        assert first.metrics.cached_tokens == second.metrics.cached_tokens == 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prompt_embeds": [[0.5]]}, "pass an array of floats"),
        ({"prompt_embeds": np.zeros((2, 32), int)}, "pass an array of floats"),
        ({"prompt_embeds": np.zeros((0, 32))}, "pass an array of floats"),
        ({"prompt_embeds": np.zeros(32)}, "pass an array of floats"),
        ({"prompt_embeds": torch.zeros(2, 32, dtype=torch.complex64)}, "pass an array of floats"),
        ({"prompt_embeds": torch.zeros(2, 32, device="meta")}, "pass an array of floats"),
        ({"prompt_embeds": torch.zeros(2, 32).to_sparse()}, "pass an array of floats"),
        ({"prompt_embeds": np.zeros((2, 7))}, r"are no float32 array of 2 x"),
        ({"prompt_embeds": np.full((2, 32), np.nan)}, "not finite"),
        ({"prompt_embeds": np.zeros((2, 32)), "prompt": "a"}, "prompt_embeds goes alone"),
    ],
    ids=range(10),
)
def test_other_values_are_refused(given: Any, text: str, checkpoints: CheckpointStore) -> None:
    with load(checkpoints["falcon-plain"].path) as llm, pytest.raises(RequestError, match=text):
        llm.generate(given, greedy(2))


def test_they_are_an_option_and_are_not_scored(checkpoints: CheckpointStore) -> None:
    path = checkpoints["falcon-plain"].path
    with load(path) as llm:
        rows = table(llm)[:3].numpy()
        with pytest.raises(RequestError, match="no token ids to score"):
            llm.generate({"prompt_embeds": rows}, SamplingParams(max_tokens=1, prompt_logprobs=1))
    with load(path, prompt_embeds=False) as llm, pytest.raises(RequestError, match="embeddings as prompts are off"):
        llm.generate({"prompt_embeds": rows}, greedy(2))


def test_they_are_read_off_the_event_loop(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(checkpoints["falcon-plain"].path) as llm:
        wanted, rows = llm.generate(TEXTS[0], greedy(3))[0].token_ids, table(llm)[torch.tensor(TEXTS[0])]
        threads, read = set[str](), llm.with_spans

        def noted(given: Any, client: str) -> Any:
            threads.add(threading.current_thread().name)
            return read(given, client)

        monkeypatch.setattr(llm, "with_spans", noted)

        async def ask() -> list[int]:
            async with AsyncLLM(llm) as model:
                return (await model.complete({"prompt_embeds": rows}, greedy(3))).token_ids

        assert asyncio.run(ask()) == wanted and threading.current_thread().name not in threads and threads
