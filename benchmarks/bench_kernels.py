"""Single operations at the shapes of a model, by each provider that is installed, against what the device can do.

    python -m benchmarks.bench_kernels benchmarks/configs/falcon-h1-7b --ops skinny_linear,attention_extend

Operations of decode steps: a time is a launch's share of a CUDA graph that runs the operation over and over, each time
on other tensors, so that nothing is found in the cache and what launches cost each other is in it. Operations of
prefill: the time of one of several calls in a row. A rate is that of the bytes that must move, or of the
products; its share is of what a large copy, or a large matrix product, reaches on this device in the same run.

    ... --ops attention_decode --tokens 24,48 --ctx 600 --long 1x32000 --table 262144

Contexts of different lengths: one of the rows has 32,000 tokens, and there is room for 262,144 of each.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import coded_cases, latent_cases, quant_cases  # noqa: F401  # their cases join those of kernel_cases
from benchmarks.common import environment, save
from benchmarks.kernel_cases import DECODE, PREFILL, Case, Cases, Load
from benchmarks.library_cases import Args
from benchmarks.step_peers import register_peers
from hybridrt.base.model_config import ModelConfig
from hybridrt.kernels.core import providers
from hybridrt.models.config.read_config import read_model_config
from tests.support.flat import flat

LAUNCHES, REPEATS = 16, 7
SLOW_REFERENCES = ("torch",)  # written to be read: no measure of what a library can do


def graph_us(call: Callable[[int], object]) -> float:
    """Microseconds of one call among LAUNCHES in a graph, median."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            call(i)
    graph.replay()
    return statistics.median(_elapsed_us(graph.replay) for _ in range(REPEATS)) / LAUNCHES


def eager_us(call: Callable[[int], object]) -> float:
    """Microseconds of one call among several, median."""
    call(0)
    once = _elapsed_us(lambda: call(0))
    count = max(min(int(20e3 / once), 100), 3)

    def several() -> None:
        for i in range(count):
            call(i)

    return statistics.median(_elapsed_us(several) for _ in range(3)) / count


def _elapsed_us(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = torch.empty(2, 1 << 29, dtype=torch.bfloat16, device="cuda").normal_()
    # Not in a graph: there a copy becomes a node of its own kind, which moves a third less.
    return source.numel() * 2 / eager_us(lambda i: source[1].copy_(source[0])) * 1e6


def products_flops_per_s() -> float:
    """Floating-point operations a second of a large bfloat16 product."""
    size = 8192
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device="cuda")
    return 2 * size**3 / eager_us(lambda i: a @ b) * 1e6


def callables(case: Case, device: str) -> Iterator[tuple[str, Callable[[Args], object]]]:
    """Everything that computes a case here, by name: our kernels first."""
    by_provider = {row.op: row for row in providers.report((device,))}[case.op]
    names = [name for name in (by_provider.picked, *by_provider.others) if name is not None]
    for name in names:
        unusable = name not in providers._IMPLEMENTATIONS[case.op] or providers.provider_objection(name, device)
        if not unusable and (name not in SLOW_REFERENCES or device == "cpu"):
            function = providers.select(case.op, device, name)
            yield name, lambda args, function=function: flat(function, **args)
    yield from case.baselines.items()
    if case.plain is not None:
        yield "plain pass", case.plain


def measure(case: Case, peaks: tuple[float, float], eager: bool) -> Iterator[dict[str, Any]]:
    """One row for each provider."""
    sets = [case.make() for _ in range(case.copies)]
    work, peak = (case.bytes, peaks[0]) if case.bytes else (case.flops, peaks[1])
    for name, function in callables(case, "cuda"):
        timed = eager_us if eager else graph_us
        try:
            us = timed(lambda i, function=function: function(sets[i % len(sets)]))
        except Exception as e:  # libraries raise what they like; the other rows are measured all the same
            print(f"  {case.op} by {name}: {type(e).__name__} {str(e)[:300]}", flush=True)
            torch.cuda.synchronize()
            continue
        rate = work / us * 1e6
        yield {"provider": name, "us": us, "rate": rate, "unit": "B/s" if case.bytes else "FLOP/s",
               "share": rate / peak}  # fmt: skip


def cases(args: argparse.Namespace, config: ModelConfig) -> Iterator[tuple[Case, Load, bool]]:
    """The cases of a model and whether they are of prefill."""
    parts: list[tuple[dict[str, Cases], list[Load], bool]] = [
        (DECODE, [Load(n, context=args.ctx, long=args.long, table=args.table) for n in args.tokens], False),
        (PREFILL, args.prefill, True),
    ]
    for ops, loads, prefill in parts:
        for op in (op for op in ops if args.ops is None or op in args.ops):
            for load in loads:
                yield from ((case, load, prefill) for case in ops[op](config, load, "cuda"))


def parse() -> argparse.Namespace:
    def pair(text: str) -> tuple[int, int]:
        rows, tokens = map(int, text.split("x"))
        return rows, tokens

    def loads(text: str) -> list[Load]:
        return [Load(*pair(item)) for item in text.split(",") if item]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="directories with a config.json")
    parser.add_argument("--ops", type=lambda t: t.split(","), help=f"of {', '.join({**DECODE, **PREFILL})}")
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 32, 64, 128])
    parser.add_argument("--prefill", type=loads, default=loads("1x8192,16x2048"), help="rows x tokens")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens before each decoded one")
    parser.add_argument("--long", type=pair, default=(0, 0), help="rows x tokens of attention's longer contexts")
    parser.add_argument("--table", type=int, default=0, help="positions for which page tables have room at least")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = parse()
    register_peers()
    peaks, rows = (copy_bytes_per_s(), products_flops_per_s()), []
    print(f"copy {peaks[0] / 1e12:.2f} TB/s, products {peaks[1] / 1e12:.0f} TFLOP/s; {environment()}")
    print(f"{'operation and shape':52} {'load':>8} {'provider':>10} {'µs':>9} {'rate':>12} {'share':>6}")
    for model in args.models:
        for case, load, prefill in cases(args, read_model_config(Path(model))):
            for row in measure(case, peaks, prefill):
                rows.append({"op": case.op, "model": Path(model).name, "shape": case.shape, "load": str(load)} | row)
                unit = row["unit"].replace("B/s", "TB/s").replace("FLOP/s", "TFLOP/s")
                print(f"{case.op + ' ' + case.shape:52} {load!s:>8} {row['provider']:>10} {row['us']:9.2f} "
                      f"{row['rate'] / 1e12:5.2f} {unit:>6} {row['share']:6.1%}", flush=True)  # fmt: skip
    if args.name:
        print(save(args.name, {"copy_bytes_per_s": peaks[0], "products_flops_per_s": peaks[1], "cases": rows}))


if __name__ == "__main__":
    main()
