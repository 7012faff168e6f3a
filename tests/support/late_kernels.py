"""Which kernels a server would compile after its warm-up. Runs without Triton's interpreter and without a GPU.

    python -m tests.support.late_kernels MODEL [DRAFTS]    prints their names, and how many kernels the warm-up launched
    python -m tests.support.late_kernels MODEL long        the same with long prompts and target_itl_ms="auto"

The engine runs on a GPU that is not there (runtime/precompile/pretend_gpu.py): kernels are noted, and what they would
have computed is drawn at random.
"""

import asyncio
import json
import random
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import torch
from triton.runtime.driver import driver

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.device import KNOWN
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.grammar.matcher import Matcher
from hybridrt.runtime.load import build_model
from hybridrt.runtime.precompile import compile_ahead, pretend_gpu
from hybridrt.runtime.precompile.compile_trace import Kernel, noted
from hybridrt.runtime.precompile.pretend_gpu import CompilingDriver, pretended
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.runtime.step.plan import StepResult
from hybridrt.server.warm_up import warm_up
from tests.gpu.test_ready import AT_ONCE, LENGTH, ROWS, draw_body, draws_of

REQUESTS = 80
LONG = (300, 700, 997, 1500, 2111, 3000, 4097, 4352, 8193, 20_000)
GPU = KNOWN["h200"]
HTTP_ALONE = {"echo", "return_token_ids", "guided_choice"}  # fields that SamplingParams lacks


class OneThread:
    """What the warm-up uses of AsyncLLM, with the engine in the caller's thread: only there is a GPU pretended."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._open: dict[str, int] = {}
        self._steps = False

    async def complete(self, prompt: list[int], params: SamplingParams) -> None:
        name = self.llm.engine.add_request(prompt, params)
        self._open[name] = params.n
        while name in self._open:
            if not self._steps:
                self._steps = True
                await asyncio.sleep(0)  # others may add theirs
                self._step()
                self._steps = False
            await asyncio.sleep(0)

    def _step(self) -> None:
        for delta in self.llm.engine.step():
            if delta.error is not None:
                raise delta.error
            if delta.finish_reason is not None:
                self._open[delta.request_id] -= 1
                if not self._open[delta.request_id]:
                    del self._open[delta.request_id]


@contextmanager
def random_results() -> Iterator[None]:
    """Tokens that come from the device are random; of drafts a random number stays."""
    draw, check = random.Random(1), ScheduledStep.check_result
    function = pretend_gpu._MetaTensors.__torch_function__

    def copy(self: Any, called: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if called is pretend_gpu._COPY and args[1].is_meta and not args[0].is_meta:
            with torch._C.DisableTorchFunction():
                return args[0].random_(3, 60) if args[0].dtype == torch.int64 else args[0].fill_(1)
        return function(self, called, types, args, kwargs)

    def gain(step: ScheduledStep, result: StepResult) -> None:
        for (request, most), tokens in zip([row for row in step.rows if row[1]], result.tokens, strict=True):
            if request.params.logprobs is None:
                tokens += [draw.randrange(3, 60) for _ in range(draw.randint(1, most) - len(tokens))]
        check(step, result)

    with (
        mock.patch.object(pretend_gpu._MetaTensors, "__torch_function__", copy),
        mock.patch.object(ScheduledStep, "check_result", gain),
        mock.patch.object(Matcher, "advance", lambda *_: False),
        mock.patch.object(compile_ahead, "start_cuda", mock.Mock()),
        mock.patch.object(build_model, "fill_dummy", mock.Mock()),
        mock.patch.dict("os.environ", {compile_ahead.WORKERS_VARIABLE: "0"}),
    ):
        yield


async def load(engine: OneThread, count: int) -> None:
    """The requests of tests/gpu/test_ready.py, AT_ONCE at a time."""
    draws = draws_of(engine.llm)
    vocab, numbers = engine.llm.model_config.vocab_size, iter(range(count))

    async def client(number: int) -> None:
        draw = random.Random(number)
        for _ in numbers:
            fields = {name: value for name, value in draw_body(draw, draws, vocab).items() if name not in HTTP_ALONE}
            prompt = fields.pop("prompt")
            if "logit_bias" in fields:
                fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
            await engine.complete(prompt, SamplingParams(**fields))

    await asyncio.gather(*map(client, range(AT_ONCE)))


async def long_prompts(engine: OneThread) -> None:
    """Prompts of many lengths, next to some decode rows: in graphs where there are any, then without."""
    draw = random.Random(0)

    def run(prompt: int, tokens: int) -> Coroutine[Any, Any, None]:
        params = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True)
        return engine.complete([draw.randrange(3, 60) for _ in range(prompt)], params)

    for eager, rows in product((False, True), (0, 3, 17)):
        with mock.patch.object(StepRunner, "_prompt_bucket", lambda *_: None) if eager else nullcontext():
            for length in LONG:
                await asyncio.gather(*(run(1, 30) for _ in range(rows)), run(length, 2))


def main() -> None:
    driver.set_active(CompilingDriver(GPU.capability))  # type: ignore[arg-type]
    kernels: list[Kernel] = []
    long = sys.argv[2:] == ["long"]
    drafts = SpeculativeConfig(num_draft_tokens=int(sys.argv[2])) if len(sys.argv) > 2 and not long else None
    length = 2 * max(LONG) if long else LENGTH
    sizes = {} if long else {"max_running_requests": ROWS, "chunked_prefill_size": LENGTH // 2}
    with pretended(GPU), random_results(), noted(kernels.append), torch.inference_mode():
        engine = OneThread(LLM(
            sys.argv[1], device="cuda", dtype="bfloat16", load_format="dummy", max_model_len=length,
            target_itl_ms="auto" if long else None, speculative=drafts, **sizes,
        ))  # fmt: skip
        asyncio.run(warm_up(engine))  # type: ignore[arg-type]
        ready = len(kernels)
        asyncio.run(long_prompts(engine) if long else load(engine, REQUESTS))
    print(json.dumps({"ready": ready, "late": [kernel.name for kernel in kernels[ready:]]}))


if __name__ == "__main__":
    main()
