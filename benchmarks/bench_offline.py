"""Decode steps and prefill of a whole model, against the bytes that must move.

    python -m benchmarks.bench_offline benchmarks/configs/falcon-h1-7b --batches 1,32,128,256 --prefill 1x8192

Weights are seeded random numbers from config.json alone. A decode step is the slope between two generation lengths
while all requests decode: (time at 144 tokens - time at 16 tokens) / 128, median of `--repeats`. `slowest` is the
slowest step over the median step, each step the fastest of the repeats: they repeat the same steps. The floor assumes
that tokens pick experts uniformly, which `--uniform-experts` forces.

    ... --batches "" --first-token 128,512 --mixed 32x256

Steps with short prompts, with graphs and without: milliseconds from `add_request` to the token on the host, median of
20 prompts, and of a step with decode rows and a chunk, in which the next step is launched before this one has ended.
"""

import argparse
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.common import HBM_BYTES_PER_S, PRODUCT_FLOPS_PER_S, environment, plain_vocab, prompts, save, settle
from benchmarks.short_prompts import measure_short
from benchmarks.uniform_experts import pick_uniformly
from hybridrt import LLM, SamplingParams
from hybridrt.base.dtypes import KV_CODES, STATE_DTYPES
from hybridrt.base.engine_config import EngineConfig
from hybridrt.bench.floor import prefill_flops, step_bytes

FIRST, LAST = 16, 144


def decode_ms(
    llm: LLM, batch: int, context: int, params: SamplingParams, each: list[list[float]] | None = None
) -> float:
    """Milliseconds of a decode step of `batch` requests around `context` tokens of context. Adds those of each step to
    `each`."""
    engine = llm.engine
    length = max(context - (FIRST + LAST) // 2, 1)
    ids = [engine.add_request(p, params) for p in prompts(batch, length, plain_vocab(llm.model_config))]
    fewest = run_until(llm, ids, FIRST)
    ends = [time.perf_counter()]
    steps = run_until(llm, ids, fewest + LAST - FIRST, ends) - fewest
    elapsed = ends[-1] - ends[0]
    if each is not None:
        each.append([(end - start) * 1e3 for start, end in pairwise(ends)])
    for request in ids:
        engine.abort(request)
    engine.drain()
    return elapsed / steps * 1e3


def decode_ms_of_replicas(llm: LLM, batch: int, context: int, params: SamplingParams) -> float:
    """The same of all replicas together, which step without this process: from whole generations."""
    length, seconds = max(context - (FIRST + LAST) // 2, 1), dict[int, float]()
    for tokens in (LAST, FIRST):
        start = time.perf_counter()
        llm.generate(prompts(batch, length, llm.model_config.vocab_size), replace(params, max_tokens=tokens))
        seconds[tokens] = time.perf_counter() - start
    return (seconds[LAST] - seconds[FIRST]) / (LAST - FIRST) * 1e3


def run_until(llm: LLM, ids: list[str], tokens: int, ends: list[float] | None = None) -> int:
    """Steps until every request has `tokens` tokens; returns the fewest that any has then. Adds the time at which each
    step ended to `ends`."""
    while (fewest := min(llm.engine.gained(request) or 0 for request in ids)) < tokens:
        llm.engine.step()
        if ends is not None:
            ends.append(time.perf_counter())
    return fewest


def slowest(each: list[list[float]]) -> float:
    """The slowest step over the median one, of [repeats][steps] times."""
    best = [min(times) for times in zip(*each)]
    return max(best) / statistics.median(best)


def prefill_tokens_per_s(llm: LLM, count: int, length: int) -> float:
    """Prompt tokens per second: `count` prompts of `length` tokens to their first token each."""
    batch = prompts(count, length, plain_vocab(llm.model_config), seed=1)
    start = time.perf_counter()
    llm.generate(batch, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return count * length / (time.perf_counter() - start)


def most_tokens(args: argparse.Namespace) -> int:
    """That a request generates: as many as are measured, and one in each step that computes the others' prompts."""
    return LAST + max(64, FIRST + max(args.batches, default=0) * args.ctx // args.chunk)


def measure(args: argparse.Namespace, llm: LLM) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    params = SamplingParams(max_tokens=most_tokens(args), temperature=args.temperature, ignore_eos=True, seed=1)
    executor: Any = None if args.dp > 1 else llm.engine.executor
    runner = executor if args.tp == 1 or args.dp > 1 else executor.runner
    for batch in args.batches:
        if args.dp > 1:
            decode_ms_of_replicas(llm, batch, args.ctx, params)
            ms = statistics.median(decode_ms_of_replicas(llm, batch, args.ctx, params) for _ in range(args.repeats))
            rows.append({"what": f"decode batch {batch}", "ms": ms, "tok/s": batch / ms * 1e3})
            print(f"{rows[-1]['what']:24} {ms:9.3f} ms {batch / ms * 1e3:10.0f} tok/s", flush=True)
            continue
        each = list[list[float]]()
        times = [decode_ms(llm, batch, args.ctx, params, each) for _ in range(args.repeats)]
        ms = statistics.median(times)
        floor = step_bytes(runner.model, runner.pools, batch, args.ctx).floor_ms(HBM_BYTES_PER_S)
        rows.append({"what": f"decode batch {batch}", "ms": ms, "tok/s": batch / ms * 1e3, "floor_ms": floor,
                     "slowest": slowest(each)})  # fmt: skip
        print(f"{rows[-1]['what']:24} {ms:9.3f} ms {batch / ms * 1e3:10.0f} tok/s  floor {floor:7.3f} ms "
              f"({floor / ms:5.1%})  spread {max(times) - min(times):.3f}  slowest {slowest(each):.3f}",
              flush=True)  # fmt: skip
    for count, length in args.prefill:
        prefill_tokens_per_s(llm, count, length)
        rate = statistics.median(prefill_tokens_per_s(llm, count, length) for _ in range(args.repeats))
        flops = 0.0 if runner is None else prefill_flops(runner.model, count, length) * rate / (count * length)
        rows.append({"what": f"prefill {count}x{length}", "tok/s": rate, "flop/s": flops})
        share = f"{flops / PRODUCT_FLOPS_PER_S:.1%} of {PRODUCT_FLOPS_PER_S / 1e12:.0f}"
        print(f"{rows[-1]['what']:24} {rate:24.0f} tok/s  {flops / 1e12:6.0f} TFLOP/s ({share})", flush=True)
    if args.first_token or args.mixed:
        rows += measure_short(llm, args.first_token, args.mixed, args.ctx, args.repeats)
    return rows


def sizes(text: str) -> list[int]:
    """`1,32` as numbers."""
    return [int(item) for item in text.split(",") if item]


def shapes(text: str) -> list[tuple[int, int]]:
    """`1x8192,16x2048` as (prompts, tokens of each)."""
    return [(int(a), int(b)) for a, b in (item.split("x") for item in text.split(",") if item)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory with a config.json; weights are random")
    parser.add_argument("--batches", type=sizes, default=[1, 32, 128, 256])
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of context around which decode is measured")
    parser.add_argument("--prefill", type=shapes, default=[], help="e.g. 1x8192,16x2048,1x32768")
    parser.add_argument("--chunk", type=int, default=EngineConfig.chunked_prefill_size, help="chunked_prefill_size")
    parser.add_argument("--first-token", type=sizes, default=[], help="tokens of prompts, e.g. 128,512")
    parser.add_argument("--mixed", type=shapes, default=[], help="decode rows and tokens of a chunk, e.g. 32x256")
    parser.add_argument("--prefix-cache", action="store_true", help="prompts leave states for others")
    parser.add_argument("--state-dtype", default="bfloat16", choices=sorted(STATE_DTYPES))
    parser.add_argument("--state-mode", default="auto", choices=["auto", "classic", "replay"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", *KV_CODES])
    parser.add_argument("--attention", default="auto", help="attention_backend of decode, and of prefill but for:")
    parser.add_argument("--prefill-attention", help="prefill_attention_backend, e.g. triton where a library is taken")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, a GPU each")
    parser.add_argument(
        "--dp", type=int, default=1, help="replicas, --tp GPUs each; decode is measured from generations"
    )
    parser.add_argument("--expert-parallel", action="store_true", help="all of these GPUs share the experts")
    parser.add_argument("--uniform-experts", action="store_true", help="tokens pick experts uniformly, on one GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    if args.uniform_experts and args.tp * args.dp > 1:
        parser.error("--uniform-experts is for one GPU: other ranks are processes of their own")
    return args


def main() -> None:
    args = parse()
    start = time.perf_counter()
    lengths = [*(length for _, length in args.prefill), *args.first_token, *(chunk for _, chunk in args.mixed)]
    longest = max([args.ctx + most_tokens(args) + 16, *(length + 16 for length in lengths)])
    rows = max([*args.batches, *(count + 4 for count, _ in args.mixed)], default=16)
    if args.uniform_experts:
        pick_uniformly(args.chunk + max(rows, longest))  # the plan measures a step of whole prompts
    llm = LLM(
        args.model, load_format="dummy", max_model_len=longest, mamba_ssm_dtype=args.state_dtype,
        state_mode=args.state_mode, attention_backend=args.attention, kv_cache_dtype=args.kv_cache_dtype,
        prefill_attention_backend=args.prefill_attention, max_running_requests=rows,
        tp_size=args.tp, dp_size=args.dp, expert_parallel=args.expert_parallel, prefix_cache=args.prefix_cache,
        chunked_prefill_size=args.chunk,
    )  # fmt: skip
    print(llm.plan.summary())
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0.0))
    print(f"start to first token {time.perf_counter() - start:.1f} s; {environment()}")
    settle()
    found = measure(args, llm)
    if args.name:
        print(save(args.name, found))


if __name__ == "__main__":
    main()
