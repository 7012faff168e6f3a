"""Runs requests of many shapes before a server is ready, so that no kernel is compiled while a client waits."""

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any

import numpy as np
import torch

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import EncoderInput, Span
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.base.vision import VisionSpec
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.request.outputs import RequestOutput
from hybridrt.engine.request.prompts import SpansPrompt
from hybridrt.runtime.sampling.sampler import EVERY_DRAW
from hybridrt.speculative.drafter import AdaptiveDrafter

log = logging.getLogger(__name__)

# Bitmasks have kernels of their own.
_FORM = StructuredOutputs(regex="[a-z]*")
# Prompts at once, and tokens of each: tiles are powers of two, and 9 fit no graph.
_TOGETHER = (*((n, 1) for n in (2, 9, 16, 32, 64, 128, 256)), *((9, n) for n in (2, 4, 8, 16)))
# Divisible by 16 or not; 17 tokens leave a state within them. Tiles of e4m3 products change up to 128 tokens, those of
# 4-bit weights up to 512, by powers of two.
_LENGTHS = (1, 2, 4, 8, 15, 16, 17, 32, 64, 100, 128, 256, 512)
_EAGER = 1000  # tokens of a step without a graph that a graph could run, too: attention has other tiles there
# Tokens of a cached prefix: latent attention absorbs few queries after it.
_CACHED = 192
_MANY = 16  # prompts: more than a graph holds
_OUTPUT = 4
_PROMPTS = (32, 100, 256, 512, 1024, 2048, 4096)
_SPARE = ((1 << 19, 64), (20 << 20, 4))  # bytes and numbers of blocks
_Work = tuple[int, SamplingParams]
_DECODED = 64
_SIDE = 16  # of an image, in tokens


async def warm_up(llm: AsyncLLM) -> None:
    """On a GPU: prefills from one token to a whole step, alone and together, and all kinds of
    sampling. With a target for the time between tokens, steps are timed afterwards."""
    max_prompt = llm.llm.plan.max_model_len - _OUTPUT - 1
    if llm.llm.device.type == "cuda":
        await _compile(llm, max_prompt)
        await see_images(llm)
        _keep_spare_memory(llm.llm.device)
    else:
        await llm.complete([0], SamplingParams(max_tokens=_OUTPUT))  # shows that the engine works
    if llm.llm.engine.policy is not None:
        sizes = _PROMPTS if llm.llm.device.type == "cuda" else _PROMPTS[:3]
        await _time_steps(llm, [size for size in sizes if size <= max_prompt])


async def _compile(llm: AsyncLLM, max_prompt: int) -> None:
    """If a drafter may find no draft, repeats all with drafts in every row."""
    draws = [SamplingParams(max_tokens=_OUTPUT, ignore_eos=True, **draw) for draw in EVERY_DRAW]
    constrained = _constrained(llm, draws)
    await _run_all(llm, max_prompt, draws, constrained)
    drafter = llm.llm.engine.drafter
    if isinstance(drafter, AdaptiveDrafter):
        drafter.always = True
        await _run_all(llm, max_prompt, draws, constrained)
        drafter.always = False


async def _run_all(llm: AsyncLLM, max_prompt: int, draws: list[SamplingParams], constrained: list[_Work]) -> None:
    """Runs requests of all kinds, so that later steps find their kernels loaded.

    First prompts of up to `max_prompt` tokens alone, without and with a cached prefix. Then the same
    next to a few requests that decode. Then each way of sampling, and a prompt without a graph. Then more
    requests at once than graphs hold: of one length, and with one longer prompt. Then all kinds in one step.
    """
    chunk = min(llm.llm.config.chunked_prefill_size, max_prompt)
    lengths = sorted({min(n, max_prompt) for n in (*_LENGTHS, chunk, chunk + 1)} - {0})
    rows, tokens = llm.llm.plan.num_rows, _tokens(llm)
    shared = next(tokens)

    def run(length: int, params: SamplingParams, cached: int = 0) -> Coroutine[Any, Any, RequestOutput]:
        return llm.complete([shared] * min(cached, max_prompt - length) + [next(tokens)] * length, params)

    for _ in range(2):  # the second leaves a state where prompts part
        await run(1, draws[0], _CACHED)
    for decoders in (0, min(3, rows - 1)):
        longer = replace(draws[0], max_tokens=min(_DECODED, llm.llm.plan.max_model_len - 2))
        decoding = [asyncio.ensure_future(run(1, longer)) for _ in range(decoders)]
        for length in lengths:
            await run(length, draws[0])
            await run(length, draws[0], _CACHED)
        await asyncio.gather(*decoding)
    for length, params in [*product([1], draws[1:]), *constrained]:
        await run(length, params)
    await run(max(min(_EAGER, max_prompt), 1), replace(draws[0], prompt_logprobs=0))  # no graph runs it
    for prompts, length in _TOGETHER:
        if prompts <= rows:
            await asyncio.gather(*(run(length, draws[0]) for _ in range(prompts)))
    for cached, length in product((0, _CACHED), lengths):  # the longest prompt decides some tiles
        others = (run(1, draws[0], cached) for _ in range(min(rows, _MANY) - 1))
        await asyncio.gather(*others, run(length, draws[0], cached))
    works = [*((length, params) for params, length in product(draws, lengths)), *constrained]
    for start in range(0, len(works), rows):
        await asyncio.gather(*(run(*work) for work in works[start : start + rows]))


async def see_images(llm: AsyncLLM) -> None:
    """An image alone, one next to a decoding request, and both images again, from the caches. Nothing
    in a model that takes text only."""
    spec = llm.llm.model_config.vision
    limits = llm.llm.engine.intake.limits.spans
    if spec is None or limits is None or limits.refusal:
        return
    side = min(_SIDE, math.isqrt(min(limits.most_tokens, llm.llm.plan.max_model_len - _OUTPUT - 2)))
    text = next(_tokens(llm))
    seen = [_image(spec, text, side, shade) for shade in (0, 255)]
    params = SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)
    await llm.complete(seen[0], params)
    await asyncio.gather(*(llm.complete(each, params) for each in ([text], seen[1])))
    await asyncio.gather(*(llm.complete(each, params) for each in seen))


def _image(spec: VisionSpec, text: int, side: int, shade: int) -> SpansPrompt:
    """A grey image of side * side tokens between two tokens of text."""
    rows = spec.merge * side
    patches = np.full((rows * rows, spec.patch_numbers), shade, np.uint8)
    span = Span(1, side * side, bytes([shade]) * 32, (side, side), EncoderInput(patches, (rows, rows)))
    return {"prompt_token_ids": [text, *[spec.token] * span.length, text], "spans": [span]}


def _tokens(llm: AsyncLLM) -> Iterator[int]:
    """Yields none of images, which no prompt may hold."""
    model = llm.llm.model_config
    return (token for i in count() if (token := i % model.vocab_size) not in model.image_tokens)


def _keep_spare_memory(device: torch.device) -> None:
    """Torch keeps freed memory for larger steps, separately for small and large blocks."""
    try:
        _ = [torch.empty(size, dtype=torch.uint8, device=device) for size, count in _SPARE for _ in range(count)]
    except torch.OutOfMemoryError:
        log.warning("the device has no memory to spare; lower memory_fraction, or steps may wait for memory")


def _constrained(llm: AsyncLLM, draws: list[SamplingParams]) -> list[_Work]:
    """Empty if they cannot work here. The first one loads the tokenizer into llguidance."""
    works = [(1, replace(params, ignore_eos=False, structured_outputs=_FORM)) for params in draws]
    try:
        llm.llm.engine.prepare([0], works[0][1])
    except RequestError:
        return []
    return works


async def _time_steps(llm: AsyncLLM, sizes: Sequence[int]) -> None:
    """Runs prompts of these sizes twice: alone, and next to 1 and 8 decoding requests. All begin
    differently, so none finds a cached prefix.
    """
    tokens = _tokens(llm)

    def run(prompt: int, output: int) -> Coroutine[Any, Any, RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        return llm.complete([next(tokens)] * prompt, params)

    decoded = min(_DECODED, llm.llm.plan.max_model_len - 2)
    for rows in (0, 1, 8):
        decoding = [asyncio.ensure_future(run(1, decoded)) for _ in range(min(rows, llm.llm.plan.num_rows - 1))]
        for size in [*sizes, *sizes]:
            await run(size, 1)
        await asyncio.gather(*decoding)
