"""Runs requests of many shapes before the server takes any, so that no kernel is compiled while a client waits."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any

from hybridrt.engine.async_llm import AsyncLLM
from hybridrt.engine.outputs import RequestOutput
from hybridrt.errors import RequestError
from hybridrt.runtime.sampler import EVERY_DRAW
from hybridrt.sampling_params import SamplingParams
from hybridrt.structured_outputs import StructuredOutputs

# Every draw of EVERY_DRAW is repeated with it, because bitmasks have kernels of their own.
_FORM = StructuredOutputs(regex="[a-z]*")
_TOGETHER = (2, 9, 16, 32, 64, 128, 256)  # prompts of one token; products of few tokens are compiled by powers of two
_OUTPUT = 4
_PROMPTS = (32, 100, 256, 512, 1024, 2048, 4096)
_DECODED = 64  # output tokens of the requests beside which prompts are timed


async def warm_up(llm: AsyncLLM) -> None:
    """On a GPU, prefills of one token to a whole step's, alone and together, and every kind of sampling. With
    `target_itl_ms`, steps are then timed, whose kernels are compiled by now."""
    max_prompt = llm.llm.plan.max_model_len - _OUTPUT - 1
    if llm.llm.device.type == "cuda":
        await _compile(llm, max_prompt)
    else:
        await llm.complete([0], SamplingParams(max_tokens=_OUTPUT))  # shows that the engine works
    if llm.llm.config.target_itl_ms is not None:
        sizes = _PROMPTS if llm.llm.device.type == "cuda" else _PROMPTS[:3]
        await _time_steps(llm, [size for size in sizes if size <= max_prompt])


async def _compile(llm: AsyncLLM, max_prompt: int) -> None:
    """Requests of up to `max_prompt` tokens: alone, because a step runs the kernels that any of its rows needs; then
    together, more of them than the graphs of prompts hold; then all kinds in one step."""
    chunk = min(llm.llm.config.chunked_prefill_size, max_prompt)
    lengths = sorted({min(n, max_prompt) for n in (1, 15, 16, 100, 512, chunk, chunk + 1)} - {0})
    draws = [SamplingParams(max_tokens=_OUTPUT, ignore_eos=True, **draw) for draw in EVERY_DRAW]
    constrained = _constrained(llm, draws)
    for length, params in [*product(lengths, draws[:1]), *product([1], draws[1:]), *constrained]:
        await llm.complete([0] * length, params)
    rows = llm.llm.plan.num_rows
    for together in (n for n in _TOGETHER if n <= rows):
        await asyncio.gather(*(llm.complete([0], draws[0]) for _ in range(together)))
    works = [*product(lengths, draws), *constrained]
    for start in range(0, len(works), rows):
        await asyncio.gather(*(llm.complete([0] * n, params) for n, params in works[start : start + rows]))


def _constrained(llm: AsyncLLM, draws: list[SamplingParams]) -> list[tuple[int, SamplingParams]]:
    """Requests with structured outputs; none if the model or the installation cannot give them. The first one loads the
    tokenizer into llguidance."""
    works = [(1, replace(params, ignore_eos=False, structured_outputs=_FORM)) for params in draws]
    try:
        llm.llm.engine.prepare([0], works[0][1])
    except RequestError:
        return []
    return works


async def _time_steps(llm: AsyncLLM, sizes: Sequence[int]) -> None:
    """Prompts of several sizes, twice each, alone and beside 1 and 8 requests that decode. No two prompts begin alike:
    none is found in the prefix cache."""
    firsts = count()

    def run(prompt: int, output: int) -> Coroutine[Any, Any, RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return llm.complete([next(firsts) % llm.llm.model_config.vocab_size] * prompt, params)

    decoded = min(_DECODED, llm.llm.plan.max_model_len - 2)
    for rows in (0, 1, 8):
        decoding = [asyncio.ensure_future(run(1, decoded)) for _ in range(min(rows, llm.llm.plan.num_rows - 1))]
        for size in [*sizes, *sizes]:
            await run(size, 1)
        await asyncio.gather(*decoding)
