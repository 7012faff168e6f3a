"""Single operations at the shapes of a model, beside torch's own, against what the device can copy.

    python -m benchmarks.bench_kernels benchmarks/configs/falcon-h1-7b --ops skinny_linear --tokens 1,8

A time is a launch's share of a CUDA graph that runs the operation over and over, each time on other tensors, so that
nothing is found in the cache and what launches cost each other is in it, as in a decode step.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import environment, save
from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.hf_config import read_model_config
from hybridrt.kernels.activation import relu2, silu_and_mul
from hybridrt.kernels.rms_norm import add_rms_norm
from hybridrt.kernels.skinny_linear import Activation, skinny_linear
from hybridrt.layers.embedding import VocabParallelEmbedding
from hybridrt.layers.linear import ColumnLinear, RowLinear
from hybridrt.models.registry import model_class

ROTATED_BYTES = 1 << 28  # an operation's tensors differ until this much has gone by: several times any cache
LAUNCHES = 16


@dataclass(frozen=True)
class Case:
    """One operation at one shape. `run(i)` and `baseline(i)` compute it on the i-th of `copies` sets of tensors."""

    op: str
    shape: str
    tokens: int
    bytes: int
    copies: int
    run: Callable[[int], object]
    baseline: Callable[[int], object]


Cases = Callable[[ModelConfig, int, str], Iterator[Case]]
OPS: dict[str, Cases] = {}


def cases_of(op: str) -> Callable[[Cases], Cases]:
    """Registers a function that yields the cases of an operation for a model, a number of tokens and a device."""

    def register(cases: Cases) -> Cases:
        OPS[op] = cases
        return cases

    return register


def linears(config: ModelConfig) -> dict[tuple[int, int, bool, Activation | None], str]:
    """(rows, columns, behind a norm, activation) of the model's weights and the name of the first that has them."""
    model = model_class(config.architecture)(
        config, tp=TPGroup(), dtype=torch.bfloat16, device=torch.device("meta"), max_len=1
    )
    activations: dict[str, Activation] = {"gate_up": "silu_and_mul", "up": "relu2"}
    found: dict[tuple[int, int, bool, Activation | None], str] = {}
    for module in model.modules():
        if isinstance(module, (ColumnLinear, RowLinear)) or module is getattr(model, "head", None):
            assert isinstance(module, (ColumnLinear, RowLinear, VocabParallelEmbedding))
            rows, columns = module.weight.shape
            name = module.name.split(".")[-1]
            found.setdefault((rows, columns, isinstance(module, ColumnLinear), activations.get(name)), name)
    return found


@cases_of("skinny_linear")
def skinny_linear_cases(config: ModelConfig, tokens: int, device: str) -> Iterator[Case]:
    for (rows, columns, normed, activation), name in linears(config).items():
        copies = min(max(ROTATED_BYTES // (2 * rows * columns), 2), LAUNCHES)
        weights = torch.randn(copies, rows, columns, dtype=torch.bfloat16, device=device).mul_(columns**-0.5)
        x, residual = torch.randn(2, tokens, columns, dtype=torch.bfloat16, device=device)
        norm = torch.ones(columns, device=device) if normed else None
        activate = {"silu_and_mul": silu_and_mul, "relu2": relu2, None: lambda y: y}[activation]

        def run(i, weights=weights, x=x, residual=residual, norm=norm, activation=activation):  # type: ignore[no-untyped-def]
            before = None if norm is None else residual
            return skinny_linear(x, weights[i], norm_weight=norm, eps=1e-5, residual=before, activation=activation)

        def baseline(i, weights=weights, x=x, residual=residual, norm=norm, activate=activate):  # type: ignore[no-untyped-def]
            h = x if norm is None else add_rms_norm(x, residual, norm, 1e-5)[0]
            return activate(F.linear(h, weights[i]))

        moved = 2 * (rows * columns + tokens * (rows + columns * (3 if normed else 1)))
        yield Case("skinny_linear", f"{name} {rows}x{columns}", tokens, moved, copies, run, baseline)


def microseconds(call: Callable[[int], object], copies: int, repeats: int = 7) -> float:
    """Median time of one call among LAUNCHES in a graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            call(i % copies)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = torch.empty(2, 1 << 29, dtype=torch.bfloat16, device="cuda").normal_()
    moved = source[0].numel() * 2 * 2
    return moved / (microseconds(lambda i: source[1].copy_(source[0]), 1) * 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="directories with a config.json")
    parser.add_argument("--ops", type=lambda t: t.split(","), default=sorted(OPS), help="comma-separated")
    parser.add_argument("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2, 8, 16])
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    copy, rows = copy_bytes_per_s(), []
    print(f"copy {copy / 1e12:.2f} TB/s; {environment()}")
    print(f"{'operation and shape':44} {'tokens':>6} {'µs':>8} {'TB/s':>6} {'of copy':>8} {'torch µs':>9}")
    for model, op, tokens in ((m, o, t) for m in args.models for o in args.ops for t in args.tokens):
        for case in OPS[op](read_model_config(Path(model)), tokens, "cuda"):
            ours, torch_us = microseconds(case.run, case.copies), microseconds(case.baseline, case.copies)
            rate = case.bytes / ours * 1e6
            rows.append({"op": op, "model": Path(model).name, "shape": case.shape, "tokens": tokens,
                         "us": ours, "TB/s": rate / 1e12, "torch_us": torch_us})  # fmt: skip
            print(f"{op + ' ' + case.shape:44} {tokens:6} {ours:8.2f} {rate / 1e12:6.2f} {rate / copy:8.1%} "
                  f"{torch_us:9.2f}", flush=True)  # fmt: skip
    if args.name:
        print(save(args.name, {"copy_bytes_per_s": copy, "cases": rows}))


if __name__ == "__main__":
    main()
