"""`LLM.embed`: hidden states after the final norm, as transformers gives them, alone and in batches."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrt import LLM, SamplingParams
from hybridrt.base.errors import RequestError
from tests.support.checkpoints import Make, falcon, nemotron, qwen, write
from tests.support.sizes import VOCAB
from tests.support.windowed_checkpoints import gpt_oss, lara

FAMILIES: dict[str, Make] = {
    "falcon": falcon(), "nemotron": nemotron("M*-M"), "qwen": qwen(), "windows": gpt_oss(), "windows and gdn": lara(),
}  # fmt: skip
LENGTHS = (1, 5, 16, 17, 40, 3)
PROMPTS = [[(7 * i + 3 * k) % (VOCAB - 8) + 4 for k in range(n)] for i, n in enumerate(LENGTHS)]
Oracle = Callable[[list[int], str], np.ndarray]
# A chunk takes 16 tokens, so that prompts are computed in several steps, next to each other.
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_running_requests": 4, "max_model_len": 64, "chunked_prefill_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Oracle]]:
    path: Path = tmp_path_factory.mktemp("model")
    model = write(FAMILIES[request.param], path).eval()

    def oracle(tokens: list[int], pooling: str) -> np.ndarray:
        with torch.inference_mode():
            hidden = model.base_model(torch.tensor([tokens])).last_hidden_state[0].float()
        return np.asarray(hidden[-1] if pooling == "last" else hidden.mean(0))

    with LLM(str(path), **OPTIONS) as llm:
        yield llm, oracle


def unit(v: np.ndarray) -> np.ndarray:
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(pooling: str, models: tuple[LLM, Oracle]) -> None:
    """In one batch, with its prefixes cached afterwards, and next to requests that decode."""
    llm, oracle = models
    want = np.stack([oracle(prompt, pooling) for prompt in PROMPTS])
    for _ in range(2):
        got = llm.embed(PROMPTS, pooling=pooling, normalize=False)
        assert got.dtype == np.float32 and np.allclose(got, want, rtol=1e-3, atol=2e-4)
    assert np.allclose(llm.embed(PROMPTS, pooling=pooling), unit(want), atol=1e-4)
    cut = llm.embed(PROMPTS, pooling=pooling, dimensions=5)
    assert cut.shape == (len(PROMPTS), 5) and np.allclose(cut, unit(want[:, :5]), atol=2e-4)
    stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=20, ignore_eos=True))
    next(stream)
    assert np.allclose(llm.embed(PROMPTS[4:], pooling=pooling, normalize=False), want[4:], rtol=1e-3, atol=2e-4)
    stream.close()


def test_the_mean_sees_tokens_that_are_cached(models: tuple[LLM, Oracle]) -> None:
    llm, oracle = models
    prompt = [*PROMPTS[4], 9]
    llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0))
    asked = llm.engine.counters().cache_hit
    got = llm.embed(prompt, pooling="mean", normalize=False)[0]
    assert np.allclose(got, oracle(prompt, "mean"), atol=2e-4)
    assert llm.engine.counters().cache_hit == asked
    assert np.allclose(llm.embed(prompt, normalize=False)[0], oracle(prompt, "last"), atol=2e-4)
    assert llm.engine.counters().cache_hit > asked, "the last token needs no other hidden state"


@pytest.mark.parametrize(
    ("options", "text"),
    [({"pooling": "max"}, "last, mean"), ({"dimensions": 0}, "from 1 to 32"), ({"dimensions": 33}, "from 1 to 32")],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str, models: tuple[LLM, Oracle]) -> None:
    with pytest.raises(RequestError, match=text):
        models[0].embed([5], **options)


def test_a_retracted_prompt_is_summed_anew() -> None:
    """The sum begins again where its prompt does."""
    from tests.engine.test_scheduler import request

    sample = request(0, 24)
    sample.params = SamplingParams(pooling="mean")
    one = np.ones(4, np.float32)
    for computed in (0, 8, 0, 8, 16):
        sample.pool(computed, one)
    assert sample.pooled is not None and sample.pooled.tolist() == [3.0] * 4
