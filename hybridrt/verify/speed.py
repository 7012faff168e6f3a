"""Speed of decode steps and prompts, compared with the floor of the device."""

import statistics
import time
from collections.abc import Callable
from uuid import uuid4

import torch

from hybridrt.base.device import synchronize
from hybridrt.base.dtypes import dtype_name
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.bench.floor import prefill_flops, step_bytes
from hybridrt.engine.api.llm import LLM
from hybridrt.verify.ours import plain_engine
from hybridrt.verify.prompts import random_tokens
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject

COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes
SIDE = {"cpu": 1024, "cuda": 8192}  # of a square matrix
REPEATS = 3
FIRST, LAST, CONTEXT = 8, 40, 128


def check_speed(subject: Subject, result: Result) -> None:
    """Milliseconds of a decode step and tokens a second of a prompt, and their floors on this
    device."""
    if subject.broken or subject.config is None:
        return result.leave_out(subject.broken or "config.json cannot be read")
    import random

    device, draw = subject.torch_device, random.Random(2)
    subject.begin("speed of the device")
    bandwidth, flops = copy_speed(device), product_speed(device, subject.torch_dtype)
    subject.begin("speed of the model")
    dtype = dtype_name(subject.torch_dtype)
    with plain_engine(subject, dtype, prefix_cache=False, cuda_graph_prompts=True) as llm:
        length = min(256 if subject.quick else 512, llm.plan.max_model_len - LAST - 1)
        prompt = random_tokens(subject, length, draw)
        decode = _decode_seconds(llm, prompt[: min(CONTEXT, length)])
        first = _best(lambda: _generate(llm, prompt, 1))
        runner = llm.engine.executor
        model, pools = getattr(runner, "model", None), getattr(runner, "pools", None)
        if model is not None and pools is not None:
            moved = step_bytes(model, pools, 1, CONTEXT).total
            result.figures |= {
                "decode_floor_ms": moved / bandwidth * 1e3, "decode_share": moved / bandwidth / decode,
                "prompt_floor_ms": prefill_flops(model, 1, length) / flops * 1e3,
            }  # fmt: skip
    result.figures |= {
        "bytes_per_s": bandwidth, "flops_per_s": flops, "decode_ms": decode * 1e3, "prompt_ms": first * 1e3,
        "prompt_tokens_per_s": length / first,
    }  # fmt: skip
    _say(result, length)


def _say(result: Result, length: int) -> None:
    f = result.figures
    floors = [f" (floor {f[name]:.3f} ms)" if name in f else "" for name in ("decode_floor_ms", "prompt_floor_ms")]
    result.done(f"a decode step of one request takes {f['decode_ms']:.3f} ms{floors[0]}")
    result.notes.append(
        f"a prompt of {length} tokens takes {f['prompt_ms']:.2f} ms{floors[1]}, {f['prompt_tokens_per_s']:.0f} tokens/s"
    )
    result.notes.append(
        f"the device copies {f['bytes_per_s'] / 1e9:.1f} GB/s and multiplies {f['flops_per_s'] / 1e12:.2f} Tflop/s: "
        "floors follow from these"
    )


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    size = COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    return 2 * size / _best(copy)


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large product."""
    side = SIDE[device.type]
    a = torch.ones(side, side, dtype=dtype, device=device)

    def multiply() -> None:
        torch.mm(a, a)
        synchronize(device)

    return 2 * side**3 / _best(multiply)


def _decode_seconds(llm: LLM, prompt: list[int]) -> float:
    """The slope of the time over the length of the answer."""
    _generate(llm, prompt, LAST)  # warms up
    slopes = [(_generate(llm, prompt, LAST) - _generate(llm, prompt, FIRST)) / (LAST - FIRST) for _ in range(REPEATS)]
    return max(statistics.median(slopes), 1e-9)


def _generate(llm: LLM, prompt: list[int], count: int) -> float:
    salt = uuid4().hex  # a kept engine has a prefix cache
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, cache_salt=salt)
    start = time.perf_counter()
    llm.generate([prompt], params)
    return time.perf_counter() - start


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest run, after one that warms up."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
