"""What a server runs before it is ready: every kind of sampling alone, and more prompts at once than a graph holds."""

import asyncio
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.runtime.sampling.sampler import EVERY_DRAW
from hybridrt.server import warm_up

ROWS = 20


class Requests:
    """An AsyncLLM that notes which requests run together, as (tokens, parameters)."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, SamplingParams]]] = []
        self._waiting: list[tuple[int, SamplingParams]] = []
        self.drafter = None
        config, plan = SimpleNamespace(chunked_prefill_size=64), SimpleNamespace(num_rows=ROWS, max_model_len=64)
        model_config = SimpleNamespace(vocab_size=1000, image_tokens={2: "image_token_id"})
        self.llm = SimpleNamespace(config=config, model_config=model_config, plan=plan, engine=self)

    def prepare(self, *_: object) -> None:
        raise RequestError("this model has no tokenizer")

    async def complete(self, prompt: list[int], params: SamplingParams) -> None:
        assert 2 not in prompt
        self._waiting.append((len(prompt), params))
        await asyncio.sleep(0)
        if self._waiting:
            self.steps.append(self._waiting)
            self._waiting = []


def test_every_kind_of_sampling_runs_alone() -> None:
    """A step runs the kernels that any of its rows needs, and a kernel for top-p alone is another one."""
    requests: Any = Requests()
    asyncio.run(warm_up._compile(requests, 40))
    alone = [step[0][1] for step in requests.steps if len(step) == 1]
    off: dict[str, Any] = {"top_k": -1, "top_p": 1.0, "min_p": 0.0}
    found = {tuple(name for name, value in off.items() if getattr(params, name) != value) for params in alone}
    assert found >= {names for size in range(4) for names in combinations(off, size)}
    for draw in EVERY_DRAW:
        assert any(all(getattr(params, name) == value for name, value in draw.items()) for params in alone), draw
    assert max(len(step) for step in requests.steps if all(tokens == 1 for tokens, _ in step)) == 16
    assert max(map(len, requests.steps)) == ROWS and {tokens for step in requests.steps for tokens, _ in step} >= {
        1,
        40,
    }


def test_a_prompt_has_a_token_where_no_more_fit() -> None:
    """With a max_model_len of 5, and without a graph."""
    requests: Any = Requests()
    asyncio.run(warm_up._compile(requests, 0))
    prompts = [(tokens, params) for step in requests.steps for tokens, params in step]
    assert all(tokens for tokens, _ in prompts)
    assert any(len(step) == 1 and step[0][1].prompt_logprobs is not None for step in requests.steps)
