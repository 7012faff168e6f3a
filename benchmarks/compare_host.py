"""Host time of an engine step compared with another checkout's, in turns.

    git archive 90fb57c0 | tar x -C /tmp/before
    python benchmarks/compare_host.py /tmp/before [--turns 60] [--rows 1,32,256] [--backends] [--chunk 2900]

The doubles are those of `bench_host.py` of each checkout: model, backend, graphs and sampler return
at once. With --backends only what needs a GPU is replaced: recorded graphs do nothing, and Triton
launches nothing after its own Python code. The backends, the graph runner and the sampler are those
of each checkout, as on a GPU. Then there is no reading of tokens from a GPU, and no copy to it.

With --chunk, each step also computes a prompt of so many tokens, without a graph: all 44 layers of
Falcon-H1-7B, with smaller ones of everything that costs the host nothing. All operations are those of
Triton, as on a GPU, and products are not computed.

Both checkouts run at the same time, in a process each, and take turns of STEPS steps in which all
requests decode. A turn's figure is the median of the CPU times of its steps. The table has the
medians over turns, and the median of the turns' ratios.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parents[1]
STEPS, CONTEXT = 20, 1000
# What is launched around the graph of a step. On a CPU, torch serves everything else.
LAUNCHED = "fill_decode_metadata=triton,greedy=triton,enter_tokens=triton"
MANY_LOGITS = 65536  # so many are reduced by two kernels
MANY_LAYERS = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 44, "num_attention_heads": 12,
    "num_key_value_heads": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
}  # fmt: skip


class NoLaunch:
    """A compiled kernel that does nothing. Those that find tokens find token 5."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self.name = name

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *given: Any) -> None:
        if self.name.endswith("_reduce_kernel"):  # older checkouts call it so
            given[-6 + 2].fill_(5)  # its arguments: the best, their tokens, the result, and three numbers


class NoDriver:
    """Triton's driver without a GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class NoRecorder:
    """Records a graph that does nothing."""

    def __call__(self, *_: object) -> Callable[[], None]:
        return lambda: None

    def split(self) -> None: ...


def first_of(*names: str) -> ModuleType:
    """The module of the first name that this checkout has."""
    for name in names:
        if importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name):
            return importlib.import_module(name)
    raise SystemExit(f"this checkout has none of {', '.join(names)}")


def launch_nothing() -> None:
    """Lets Triton "run" on a CPU: all of a launch but the compiler and the kernel."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compiled(self: Any, key: str, *_: object, **__: object) -> NoLaunch:
        kernel = self.device_caches[0][0][key] = NoLaunch(self.__name__)
        return kernel

    driver.set_active(NoDriver())
    JITFunction._do_compile = compiled
    providers: Any = first_of("hybridrt.kernels.core.providers", "hybridrt.kernels.providers")
    providers.PROVIDERS["triton"] = replace(providers.PROVIDERS["triton"], devices=("cpu", "cuda"))
    if hasattr(providers, "_live"):
        providers._live = lambda function: function  # for recordings of a CPU


def multiply_nothing(torch: Any) -> None:
    """Products have results of the right shape, and every operation that Triton has goes to it."""
    providers: Any = first_of("hybridrt.kernels.core.providers", "hybridrt.kernels.providers")
    providers._import_operations()
    names = [op for op, found in providers._IMPLEMENTATIONS.items() if "triton" in found]
    providers._overrides = lambda: dict.fromkeys(names, "triton")
    torch.nn.functional.linear = lambda x, weight, bias=None: x.new_empty(len(x), len(weight))
    torch.Tensor.addmm_ = lambda total, *_: total


def build_with_backends(bench: Any, directory: str, rows: int, steps: int, chunk: int) -> Any:
    """As `build` of bench_host, with the backends, graph runners and sampler of a GPU."""
    launch_nothing()
    shape = bench.SHAPE | {"vocab_size": MANY_LOGITS, "head_dim": 16, "mamba_d_state": 16}
    if chunk:
        multiply_nothing(bench.torch)
        shape |= MANY_LAYERS
    (Path(directory) / "config.json").write_text(json.dumps(shape))
    llm = bench.LLM(
        directory, device="cpu", load_format="dummy", max_model_len=max(CONTEXT + steps, chunk) + 64,
        max_running_requests=rows + 8 * bool(chunk), prefix_cache=False, state_mode="replay",
        attention_backend="triton", prefill_attention_backend="triton" if chunk else "torch",
        **({"chunked_prefill_size": rows + chunk, "dtype": "bfloat16"} if chunk else {}),
    )  # fmt: skip
    first_of("hybridrt.runtime.run.capture", "hybridrt.runtime.capture").make_recorder = lambda _: NoRecorder()  # type: ignore[attr-defined]
    runner = llm.engine.executor
    runner.capture()
    for graphs in (*runner.graphs.values(), runner.prompt_graphs):
        if graphs is not None:
            graphs.poisoned = graphs.exact_lens = graphs.exact = False
    llm.engine._max_in_flight = 1
    return llm


def serve(rows: int, turns: int, backends: bool, chunk: int) -> None:
    """Prints the milliseconds of a step of `rows` requests for each line of standard input, with
    the `benchmarks.bench_host` that is found first."""
    bench = importlib.import_module("benchmarks.bench_host")
    bench.torch.set_num_threads(1)
    steps = STEPS * (turns + 1)
    params = bench.SamplingParams(max_tokens=steps + 32, temperature=0.0, ignore_eos=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        build_with_backends(bench, directory, rows, steps, chunk)
        if backends
        else bench.build(directory, rows, CONTEXT, steps) as llm,
    ):
        engine = llm.engine
        for row in range(rows):
            engine.add_request([3 + row % 500] * CONTEXT, params, stream=False)
        while engine.counters().waiting or engine.counters().output_tokens < 4 * rows:
            engine.step()
        bench.settle()
        for _ in sys.stdin:
            with bench.Interrupts():
                print(statistics.median(step_seconds(bench, engine, chunk) for _ in range(STEPS)) * 1e3, flush=True)


def step_seconds(bench: Any, engine: Any, chunk: int) -> float:
    if chunk:
        engine.add_request([3] * chunk, bench.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    start = time.thread_time()
    engine.step()
    return time.thread_time() - start


def compare(other: Path, rows: int, turns: int, backends: bool, chunk: int) -> list[tuple[float, float]]:
    """Milliseconds of a step there and here, by turn. The first turn warms up."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(rows), "--turns", str(turns)]
    command += [*(["--backends"] if backends else []), "--chunk", str(chunk)]
    launched = {"HYBRIDRT_PROVIDERS": LAUNCHED} if backends and not chunk else {}
    servers = [
        subprocess.Popen(
            command, cwd=each, env=os.environ | launched | {"PYTHONPATH": str(each)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for each in (other, HERE)
    ]  # fmt: skip
    found = []
    for _ in range(turns + 1):
        pair = []
        for server in servers:
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write("\n")
            server.stdin.flush()
            pair.append(float(server.stdout.readline()))
        found.append((pair[0], pair[1]))
    for server in servers:
        server.communicate()
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 32, 256])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--backends", action="store_true", help="with backends, graph runner and sampler")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prompt in each step (implies --backends)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    backends = args.backends or args.chunk > 0
    if args.serve is not None:
        return serve(args.serve, args.turns, backends, args.chunk)
    if args.other is None:
        parser.error("name the other checkout")
    for rows in args.rows:
        pairs = compare(args.other, rows, args.turns, backends, args.chunk)
        there, here = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(here / there for there, here in pairs)
        print(f"{rows:4} rows: {there:.3f} ms there, {here:.3f} here, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
