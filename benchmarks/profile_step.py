"""One decode step as a table: which kernels run, how often, for how long; and how long the host takes.

python -m benchmarks.profile_step benchmarks/configs/falcon-h1-7b --batch 32 --trace step.json --picture step.svg
"""

import argparse
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_offline import prompts, run_until
from benchmarks.timeline import Span, draw
from hybridrt import LLM, SamplingParams
from hybridrt.config import DTYPES


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


def step_spans(prof: profile) -> list[Span]:
    """The kernels of the last whole step: what ran between the last two starts of the step's first kernel."""
    on_device = [e for e in prof.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [Span(e.name, e.device_resource_id, e.time_range.start, e.time_range.end) for e in on_device]
    spans = sorted((span for span in spans if "Memcpy" not in span.name), key=lambda span: span.start)
    starts = [i for i, span in enumerate(spans) if span.name == "_fill_decode_metadata_kernel"]
    return spans[starts[-2] : starts[-1]] if len(starts) > 1 else spans


def host_ms(llm: LLM, steps: int) -> float:
    """Milliseconds that the host spends to launch and consume a step, when it never has to wait."""
    torch.cuda.synchronize()
    start = time.process_time()
    for _ in range(steps):
        llm.engine.step()
    return (time.process_time() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--state-dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--state-mode", default="auto", choices=["auto", "classic", "replay"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prefill", type=int, default=0, help="profile one prefill of this many tokens instead")
    parser.add_argument("--trace", help="write a chrome trace")
    parser.add_argument("--picture", help="write a timeline of one step (an SVG)")
    args = parser.parse_args()
    llm = LLM(
        args.model, load_format="dummy", max_model_len=max(args.ctx, args.prefill) + 512, state_mode=args.state_mode,
        mamba_ssm_dtype=args.state_dtype, max_running_requests=args.batch, cuda_graph_max_bs=args.batch,
    )  # fmt: skip
    params = SamplingParams(max_tokens=400, temperature=args.temperature, ignore_eos=True)
    if args.prefill:
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        batch = prompts(1, args.prefill, llm.model_config.vocab_size)
        llm.generate(batch, one)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            llm.generate(batch, one)
            torch.cuda.synchronize()
        steps = 1
    else:
        batch = prompts(args.batch, args.ctx, llm.model_config.vocab_size)
        ids = [llm.engine.add_request(p, params) for p in batch]
        run_until(llm, ids, 8)
        steps = args.steps
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            for _ in range(steps):
                llm.engine.step()
            torch.cuda.synchronize()
    table = kernel_table(prof, steps)
    busy = sum(us for *_, us in table)
    print(f"{'µs/step':>10} {'share':>7} {'launches':>9}  kernel")
    for name, launches, us in table[: args.rows]:
        print(f"{us:10.1f} {us / busy:7.1%} {launches:9.1f}  {name[:110]}")
    print(f"{busy:10.1f} {'':7} {sum(n for _, n, _ in table):9.1f}  all kernels")
    if not args.prefill:
        print(f"host: {host_ms(llm, 32):.3f} ms of process time a step")
    if args.trace:
        prof.export_chrome_trace(args.trace)
    if args.picture:
        draw(step_spans(prof), args.picture)


if __name__ == "__main__":
    main()
