"""A step as a table: which kernels run, how often, for how long, and how long none runs. Of decode, prefill, or both.

A kernel that starts early waits within its time. What it adds is how much later it ends than all that have ended
before it.

python -m benchmarks.profile_step benchmarks/configs/falcon-h1-7b --batch 32 --trace step.json --picture step.svg
python -m benchmarks.profile_step benchmarks/configs/falcon-h1-7b --prefill 1x8192,16x2048
python -m benchmarks.profile_step benchmarks/configs/falcon-h1-7b --mixed 64x320,64x448
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_offline import run_until, shapes
from benchmarks.common import prompts
from benchmarks.short_prompts import add_chunks, decoding
from benchmarks.timeline import Span, draw
from hybridrt import LLM, SamplingParams
from hybridrt.base.dtypes import KV_CODES, STATE_DTYPES


def kernel_table(prof: profile, steps: int) -> list[tuple[str, float, float]]:
    """(kernel, launches a step, microseconds a step), most expensive first."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in prof.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = total[event.name]
            entry[0] += 1
            entry[1] += event.device_time
    table = [(name, n / steps, us / steps) for name, (n, us) in total.items()]
    return sorted(table, key=lambda row: -row[2])


def device_spans(prof: profile) -> list[Span]:
    """What ran on the device, by start."""
    on_device = [e for e in prof.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [Span(e.name, e.device_resource_id, e.time_range.start, e.time_range.end) for e in on_device]
    return sorted(spans, key=lambda span: span.start)


def step_spans(spans: list[Span]) -> list[Span]:
    """The kernels of the last whole step: what ran between the last two starts of the step's first kernel."""
    kernels = [span for span in spans if "Memcpy" not in span.name]
    starts = [i for i, span in enumerate(kernels) if span.name == "_fill_decode_metadata_kernel"]
    return kernels[starts[-2] : starts[-1]] if len(starts) > 1 else kernels


def added_us(spans: list[Span]) -> dict[str, float]:
    """By name of a kernel, how many microseconds later it ends than all that have ended before it, its own at most."""
    added: dict[str, float] = defaultdict(float)
    end = spans[0].start
    for span in sorted(spans, key=lambda span: span.end):
        added[span.name] += span.end - max(end, span.start)
        end = span.end
    return added


def idle_us(spans: list[Span]) -> float:
    """Microseconds between the first start and the last end in which nothing runs. An early launch counts as running
    from its start, which may lie before its predecessor's end."""
    idle, end = 0.0, spans[0].start
    for span in spans:
        idle += max(span.start - end, 0.0)
        end = max(end, span.end)
    return idle


def host_ms(llm: LLM, steps: int) -> float:
    """Milliseconds that the host spends to launch and consume a step, when it never has to wait."""
    torch.cuda.synchronize()
    start = time.process_time()
    for _ in range(steps):
        llm.engine.step()
    return (time.process_time() - start) / steps * 1e3


def record(work: Callable[[], object]) -> profile:
    """A profile of `work` and of what it launched."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        work()
        torch.cuda.synchronize()
    return prof


def profile_prefill(llm: LLM, count: int, length: int) -> profile:
    """`count` prompts of `length` tokens, to their first token each."""
    batch = prompts(count, length, llm.model_config.vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm.generate(batch, params)
    return record(lambda: llm.generate(batch, params))


def profile_decode(llm: LLM, args: argparse.Namespace) -> profile:
    """`args.steps` decode steps of `args.batch` requests."""
    params = SamplingParams(max_tokens=400, temperature=args.temperature, ignore_eos=True)
    batch = prompts(args.batch, args.ctx, llm.model_config.vocab_size)
    run_until(llm, [llm.engine.add_request(p, params) for p in batch], 8)
    return record(lambda: [llm.engine.step() for _ in range(args.steps)])


def profile_mixed(llm: LLM, rows: int, tokens: int, args: argparse.Namespace) -> profile:
    """`args.steps` steps in which `rows` requests decode and a prompt of `tokens` is computed."""
    vocab = llm.model_config.vocab_size
    with decoding(llm, prompts(rows, args.ctx, vocab), 2 * args.steps):
        add_chunks(llm, prompts(args.steps, tokens, vocab, seed=1))
        return record(lambda: add_chunks(llm, prompts(args.steps, tokens, vocab, seed=2)))


def report(prof: profile, steps: int, args: argparse.Namespace) -> None:
    """Prints the table, and writes what else was asked for."""
    table, spans = kernel_table(prof, steps), device_spans(prof)
    busy, added = sum(us for *_, us in table), added_us(spans)
    print(f"{'µs/step':>10} {'share':>7} {'added':>10} {'launches':>9}  kernel")
    for name, launches, us in table[: args.rows]:
        print(f"{us:10.1f} {us / busy:7.1%} {added[name] / steps:10.1f} {launches:9.1f}  {name[:110]}")
    launches = sum(n for _, n, _ in table)
    print(f"{busy:10.1f} {'':7} {sum(added.values()) / steps:10.1f} {launches:9.1f}  all kernels")
    print(f"{idle_us(spans) / steps:10.1f} {'':7} {'':10} {'':9}  nothing runs")
    if args.trace:
        prof.export_chrome_trace(args.trace)
    if args.picture:
        draw(step_spans(spans), args.picture)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=1, help="ranks, a GPU each: the table is that of rank 0")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--state-dtype", default="bfloat16", choices=sorted(STATE_DTYPES))
    parser.add_argument("--state-mode", default="auto", choices=["auto", "classic", "replay"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", *KV_CODES])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prefill", type=shapes, default=[], help="profile prefills instead, e.g. 1x8192,16x2048")
    parser.add_argument("--mixed", type=shapes, default=[], help="profile decode rows next to a prompt, e.g. 64x448")
    parser.add_argument("--trace", help="write a chrome trace")
    parser.add_argument("--picture", help="write a timeline of one step (an SVG)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    longest = max([args.ctx, *(length for _, length in [*args.prefill, *args.mixed])])
    most = max([args.batch, *(rows + 2 for rows, _ in args.mixed)])
    llm = LLM(
        args.model, load_format="dummy", max_model_len=longest + 512, state_mode=args.state_mode, tp_size=args.tp,
        mamba_ssm_dtype=args.state_dtype, kv_cache_dtype=args.kv_cache_dtype, max_running_requests=most,
        cuda_graph_max_bs=most, prefix_cache=False,
    )  # fmt: skip
    for count, length in args.prefill:
        print(f"prefill {count}x{length}")
        report(profile_prefill(llm, count, length), 1, args)
    for rows, tokens in args.mixed:
        print(f"{rows} decode rows and a prompt of {tokens}")
        report(profile_mixed(llm, rows, tokens, args), args.steps, args)
    if not args.prefill and not args.mixed:
        report(profile_decode(llm, args), args.steps, args)
        print(f"host: {host_ms(llm, 32):.3f} ms of process time a step")


if __name__ == "__main__":
    main()
