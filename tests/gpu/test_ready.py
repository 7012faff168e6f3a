"""Ready means ready: once /ready answers 200, no kernel is compiled and no device memory is allocated."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from hybridrt import LLM, SpeculativeConfig
from hybridrt.runtime.load.model_path import resolve_model_path
from tests.gpu.rig import DEVICE, PRODUCTION
from tests.support.checkpoints import CheckpointStore
from tests.support.http_server import WAIT, Served, serving

pytestmark = PRODUCTION
LENGTH, ROWS, REQUESTS, AT_ONCE = 256, 16, 240, 24
NGRAM = SpeculativeConfig(num_draft_tokens=3)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "embedded": ("embedded", {}),
    "embedded, drafts": ("embedded", {"speculative": NGRAM}),
    "experts": ("qwen-plain", {}),
    "latent attention": ("kimi-plain", {}),
}
# Sampling of every kind that a request may ask for, and the fields of it that need a tokenizer.
TEXTS = {"logprobs", "prompt_logprobs", "stop", "guided_choice"}
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"temperature": 0.8, "top_k": 7, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "logprobs": 5, "echo": True, "return_token_ids": True},
    {"temperature": 0.5, "prompt_logprobs": 2},
    {"temperature": 0.5, "logit_bias": {"5": -3.0, "7": 2.0}, "min_tokens": 1},
    {"temperature": 1.0, "allowed_token_ids": [3, 5, 7, 9, 11], "stop_token_ids": [9]},
    {"temperature": 0, "stop": ["\n\n"], "bad_words": ["import"]},
    {"temperature": 0.7, "guided_choice": ["yes", "no", "perhaps"], "ignore_eos": False},
)


def device_allocations() -> int:
    """How often torch has asked the device for memory so far; memory that it keeps does not count."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if DEVICE == "cuda" else 0


@pytest.fixture(params=CASES)
def ready(request: pytest.FixtureRequest, checkpoints: CheckpointStore) -> Iterator[Served]:
    name, options = CASES[request.param]
    path = resolve_model_path(name) if name == "embedded" else checkpoints[name].path
    config: dict[str, Any] = {
        "device": DEVICE, "dtype": "bfloat16", "max_model_len": LENGTH, "max_running_requests": ROWS,
        "chunked_prefill_size": LENGTH // 2, "memory_fraction": 0.3, **options,
    }  # fmt: skip
    with LLM(str(path), **config) as llm, serving(llm) as served:
        yield served


def draws_of(llm: LLM) -> tuple[dict[str, Any], ...]:
    """Those of DRAWS that the model can serve."""
    return DRAWS if llm.tokenizer is not None else tuple(each for each in DRAWS if not TEXTS & each.keys())


def draw_body(draw: random.Random, draws: tuple[dict[str, Any], ...], vocab: int) -> dict[str, Any]:
    """A request of any kind."""
    head, output = [draw.randrange(3, vocab) for _ in range(40)], draw.choice((1, 2, 7, 40))
    length = draw.choice((1, 2, 15, 16, 17, 64, 100, 127, 128, 129, LENGTH - output))
    prompt = (HEAD if draw.random() < 0.3 else head) * (LENGTH // 40 + 1)  # some prompts begin alike
    body = {"prompt": prompt[:length], "max_tokens": output, "ignore_eos": True, "seed": draw.randrange(99)}
    return body | draw.choice(draws)


async def one(client: httpx.AsyncClient, draw: random.Random, draws: tuple[dict[str, Any], ...], vocab: int) -> None:
    """A request of any kind, read to its end, or left in the middle."""
    body = draw_body(draw, draws, vocab)
    if draw.random() < 0.5 or "n" in body:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return
    left = draw.random() < 0.2
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if left and line:
                break


HEAD = [random.Random(1).randrange(3, 60) for _ in range(40)]


def load(served: Served, count: int) -> None:
    """`count` requests, AT_ONCE at a time, after a burst that fills every row."""
    draws = draws_of(served.llm)
    vocab, numbers = served.llm.model_config.vocab_size, iter(range(count))

    async def client_of(number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(base_url=served.url, timeout=WAIT) as client:
            for _ in numbers:
                await one(client, draw, draws, vocab)

    async def all_of_them() -> None:
        await asyncio.gather(*map(client_of, range(AT_ONCE)))

    asyncio.run(all_of_them())
    served.wait_until_idle()


def test_nothing_is_compiled_or_allocated_after_ready(
    ready: Served, compiled: list[str], record_property: Callable[[str, object], None]
) -> None:
    with ready.http() as client:
        assert client.get("/ready").status_code == 200
    compiled.clear()
    before, reserved = device_allocations(), torch.cuda.memory_reserved() if DEVICE == "cuda" else 0
    load(ready, REQUESTS)
    allocated = device_allocations() - before
    grown = (torch.cuda.memory_reserved() if DEVICE == "cuda" else 0) - reserved
    record_property("device allocations", f"{allocated}, {grown} bytes")
    assert not compiled, f"{len(compiled)} times: {sorted(set(compiled))}"
    assert not allocated, f"{allocated} allocations of {grown} bytes in all"
