"""Time from `LLM(model)` to the first token, part by part, with an empty Triton cache and with a full one.

    python -m benchmarks.bench_start benchmarks/configs/falcon-h1-7b --serial
    python -m benchmarks.bench_start benchmarks/configs/falcon-h1-7b --checkpoint /tmp/falcon-h1-7b
    python -m benchmarks.bench_start benchmarks/configs/falcon-h1-7b --checkpoint /tmp/falcon-h1-7b \
        --snapshot /tmp/snapshot

Each run is a process of its own. Weights are seeded random numbers, or with `--checkpoint` a checkpoint that is written
there first and read from the disk: its pages are dropped from the page cache before every run, and the rate of plain
reads is measured next to it. Kernels that the process compiles by itself are named.

`--snapshot` compares starts of replicas: the `first` one, `another` one without a snapshot, one `writing` the snapshot
(compiled kernels and prepared weights), and those that start `from` it. All but the first find the files in the page
cache.
"""

import argparse
import cProfile
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

BLOCK, READERS = 16 << 20, 8
REPLICAS = ("first", "another", "writing", "from")
VARIABLE = "HYBRIDRT_PREPARED_WEIGHTS"  # named here: a child's import of hybridrt is measured
RESULT = "result: "


class Clock:
    """Seconds of the parts of a start, in the order in which they first ended."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self._inner = 0.0

    def time(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is counted to `part`, less what is counted to other parts within it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                result = self.results[part] = function(*args, **kwargs)
                return result
            finally:
                took = time.perf_counter() - start
                self.parts[part] = self.parts.get(part, 0.0) + took - self._inner
                self._inner = outer + took

        return timed


def measure(model: str, options: dict[str, Any], spawned: float, profiled: bool = False) -> dict[str, Any]:
    """In a process of its own: one start. `spawned` is when the process was started, by the wall clock."""
    clock, booted = Clock(), time.time() - spawned
    start = time.perf_counter()
    from hybridrt import LLM, SamplingParams

    clock.parts = {"interpreter": booted, "import hybridrt": time.perf_counter() - start}
    compiled = _watch(clock)
    start, profile = time.perf_counter(), cProfile.Profile()
    with profile if profiled else nullcontext():
        llm = clock.time("rest", LLM)(model, **options)
    built = time.perf_counter() - start
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0.0))
    clock.parts["first token"] = time.perf_counter() - start - built
    total = clock.parts.get("import triton", 0.0) + built + clock.parts["first token"]  # LLM() imports it, too
    executor: Any = llm.engine.executor
    runner = executor.runner if options.get("tp_size", 1) > 1 else executor
    graphs = sum(len(g._replays) for g in runner.graphs.values())
    prompts = runner.prompt_graphs
    graphs += len(prompts._graphs) if prompts else 0
    children = clock.results.get("waiting for the rest")
    if profiled:
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(45).sort_stats("cumtime").print_stats(70)
    return {
        "parts": clock.parts, "from LLM()": total, "compiled here": dict(compiled), "graphs": graphs,
        "compiled by children": asdict(children) if children else None,
    }  # fmt: skip


def _watch(clock: Clock) -> dict[str, list[float]]:
    """Times the parts of LLM(), and the kernels that this process compiles: by name, seconds of each."""
    import torch

    import hybridrt.engine.api.llm as llm
    import hybridrt.parallel.rank_start as rank_start
    import hybridrt.parallel.tensor_parallel as split
    import hybridrt.runtime.precompile.compile_ahead as compile_ahead
    import hybridrt.runtime.run.model_runner as runner
    from hybridrt.runtime.load.runtime import Runtime

    for module, name, part in (
        (split, "check_split", "check of the split"), (split, "start_ranks", "the other ranks' start"),
        (rank_start, "start_gpu", "ranks: own context"), (rank_start, "accept_links", "ranks: waiting for links"),
        (rank_start.Ranks, "meet", "ranks: collectives"),
        (runner, "load_target", "configuration"), (runner, "plan_ahead", "configuration"),
        (torch.cuda, "_lazy_init", "CUDA's start"),
        (torch.cuda, "mem_get_info", "CUDA's context"), (runner, "empty_model", "model without weights"),
        (compile_ahead, "CompileAhead", "starting compilers"), (runner, "build_model", "weights"),
        (compile_ahead.KernelsAhead, "wait_for_start", "waiting for kernels"), (runner, "plan_pools", "memory plan"),
        (compile_ahead.CompileAhead, "wait", "waiting for the rest"), (Runtime, "allocate", "pools"),
        (runner.ModelRunner, "capture", "graphs"), (llm, "read_tokenizer", "tokenizer"),
    ):  # fmt: skip
        setattr(module, name, clock.time(part, getattr(module, name)))
    _watch_graphs(clock)
    compiled: dict[str, list[float]] = defaultdict(list)
    start = time.perf_counter()
    try:
        import triton
    except ImportError:
        return compiled
    clock.parts["import triton"] = time.perf_counter() - start

    def note(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            compiled[src.name].append(times.total / 1e6)

    triton.knobs.compilation.listener = note
    return compiled


def _watch_graphs(clock: Clock) -> None:
    """Times what a bucket's graph takes: a first step, the recorded one, and torch's part around the second."""
    import torch

    from hybridrt.runtime.replay.graph_runner import GraphRunner
    from hybridrt.runtime.replay.prompt_graphs import PromptGraphs

    if torch.version.cuda is None:  # is_available would start CUDA here, outside of what is measured
        return
    for cls in (GraphRunner, PromptGraphs):
        bind: Any = cls._bind

        def bound(self: Any, *args: Any, bind: Any = bind) -> Callable[[], None]:
            step = bind(self, *args)
            first, recorded = clock.time("graphs: first step", step), clock.time("graphs: recorded step", step)
            return lambda: recorded() if torch.cuda.is_current_stream_capturing() else first()

        cls._bind = bound  # type: ignore[method-assign]
    for name, part in (("capture_begin", "graphs: begin"), ("capture_end", "graphs: end")):
        setattr(torch.cuda.CUDAGraph, name, clock.time(part, getattr(torch.cuda.CUDAGraph, name)))
    torch.cuda.synchronize = clock.time("waiting for the device", torch.cuda.synchronize)


@dataclass(frozen=True)
class Start:
    """A start in a fresh process.

    Attributes:
        cache: of Triton.
        workers: value of HYBRIDRT_COMPILE_WORKERS.
        prepared: where prepared weights are. None: they are not used.
        cold: the weights are dropped from the page cache before.
    """

    name: str
    cache: Path
    workers: str | None = None
    prepared: Path | None = None
    cold: bool = True

    def variables(self) -> dict[str, str]:
        given = {"TRITON_CACHE_DIR": self.cache, "HYBRIDRT_COMPILE_WORKERS": self.workers, VARIABLE: self.prepared}
        return {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}


def starts(args: argparse.Namespace, folders: Sequence[Path]) -> list[Start]:
    first = Start("empty cache", folders[0], cold=args.checkpoint is not None)
    if args.snapshot is not None:
        warm = replace(first, cold=False)
        kept = replace(warm, cache=args.snapshot / "kernels", prepared=args.snapshot / "weights")
        replicas = {
            "first": [first], "another": [replace(warm, name="another", cache=folders[1])],
            "writing": [replace(kept, name="writing the snapshot")],
            "from": [replace(kept, name=f"from the snapshot {i}") for i in range(1, args.repeats + 1)],
        }  # fmt: skip
        return [start for name in args.starts for start in replicas[name]]
    full = [replace(first, name=f"full cache {i}") for i in range(1, args.repeats + 1)]
    one = replace(first, name="empty cache, one process", cache=folders[1], workers="0")
    return [first, *full, *([one] if args.serial else [])]


def run(args: argparse.Namespace, model: Path, start: Start, profiled: bool = False) -> dict[str, Any]:
    if start.cold:
        forget(model)
    child = {"model": str(model), "options": args.options, "spawned": time.time(), "profiled": profiled}
    command = [sys.executable, "-m", "benchmarks.bench_start", "--child", json.dumps(child)]
    out = subprocess.run(
        command, env=start.variables(), stdout=subprocess.PIPE, text=True, timeout=args.timeout, check=False
    )
    lines = [line for line in out.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit(f"a start failed with status {out.returncode}")
    if profiled:
        print(out.stdout.partition(RESULT)[0])
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return found


def show(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}: {found['from LLM()']:.2f} s from LLM() to the first token; {found['graphs']} graphs")
    for part, seconds in found["parts"].items():
        print(f"  {part:24} {seconds:8.2f} s")
    if children := found["compiled by children"]:
        seconds = sum(children["seconds"].values()) - children["seconds"].get("trace", 0.0)
        traced, missing = children["seconds"].get("trace", 0.0), children["failures"] + children["problems"]
        print(
            f"  children found {children['kernels']} kernels in {traced:.1f} s and compiled them in {seconds:.1f} s of"
        )
        print(f"  a core; problems: {missing}")
    here = found["compiled here"]
    if here:
        seconds = sum(map(sum, here.values()))
        print(f"  this process compiled {sum(map(len, here.values()))} kernels in {seconds:.1f} s:", flush=True)
        print("   ", ", ".join(f"{name} x{len(times)}" for name, times in here.items()), flush=True)


def write_checkpoint(config: Path, into: Path) -> None:
    """A checkpoint of the configuration's shapes with random weights, in transformers' own layout."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.02)
    model.save_pretrained(into, max_shard_size="5GB")


def weight_files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def forget(model: Path) -> None:
    """Drops the weights from the page cache, so that the next reader reads the disk."""
    for file in weight_files(model):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(model: Path) -> float:
    """Bytes a second of plain reads of the weights: READERS threads, a block at a time."""
    blocks = [(f, at) for f in weight_files(model) for at in range(0, f.stat().st_size, BLOCK)]
    forget(model)

    def read(block: tuple[Path, int]) -> int:
        with block[0].open("rb", buffering=0) as opened:
            return os.preadv(opened.fileno(), [bytearray(BLOCK)], block[1])

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read, blocks))
    return total / (time.perf_counter() - start)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--checkpoint", type=Path, help="write a checkpoint there unless it is there, and load it")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="of LLM, as JSON: '{\"max_running_requests\": 8}'"
    )
    parser.add_argument("--serial", action="store_true", help="also a start that compiles in one process")
    parser.add_argument("--snapshot", type=Path, help="starts of replicas instead, with a snapshot in this directory")
    parser.add_argument("--starts", nargs="+", choices=REPLICAS, default=REPLICAS, help="with --snapshot")
    parser.add_argument("--profile", action="store_true", help="also where the last of the starts spends its time")
    parser.add_argument("--repeats", type=int, default=1, help="of the warm start")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a start may take")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.snapshot is not None and not args.checkpoint:
        parser.error("--snapshot needs --checkpoint: random weights are not prepared")
    return args


def main() -> None:
    args = parse()
    if args.child is not None:
        print(RESULT + json.dumps(measure(**args.child)), flush=True)
        return
    from benchmarks.common import environment, save  # torch with it: a child's import is measured

    model: Path = args.model
    if args.checkpoint:
        if not weight_files(args.checkpoint):
            write_checkpoint(model, args.checkpoint)
        model = args.checkpoint
        size = sum(file.stat().st_size for file in weight_files(model))
        print(f"{size / 1e9:.2f} GB of weights; plain reads {read_rate(model) / 1e9:.2f} GB/s", flush=True)
    else:
        args.options = {"load_format": "dummy"} | args.options
    print(environment())
    if args.snapshot is not None:
        os.environ.pop(VARIABLE, None)
    rows: dict[str, Any] = {}
    folders = [Path(tempfile.mkdtemp(prefix="triton-")) for _ in range(2)]
    try:
        for start in starts(args, folders):
            rows[start.name] = run(args, model, start)
            show(start.name, rows[start.name])
        if args.profile:
            show("profiled", run(args, model, start, profiled=True))
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
