"""Loads over HTTP with several targets of time between tokens, of this checkout and of another one.

    python -m benchmarks.bench_traffic benchmarks/configs/falcon-h1-7b --targets none,auto --loads long,shared
    ... --tree ../other-checkout,. --targets auto

The loads are those of `hybridrt bench serve --suite`. Each target has a server in a process of its own, which serves
the loads one after the other. Several checkouts serve at the same time, each with a GPU and an equal part of the cores:
servers of one checkout that ran one after the other differed by 10%. Weights are seeded random numbers from config.json
alone; prompts are token ids. The client is always this checkout's. `short` are prompts of fewer than 1,024 tokens:
those of "mix" that must not wait.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.common import environment, save
from hybridrt.bench.http_load import Target, new_event_loop, run_load
from hybridrt.bench.suites import ALL, SUITE, chosen
from hybridrt.bench.timing import Timing, percentile
from hybridrt.bench.workload import make_work

HERE = Path(__file__).parents[1]
SHORT = 1024  # tokens
# Serves in the checkout that it starts in, which may be an old one: prints the URL, and ends with its input.
SERVER = """
import sys, json
from benchmarks.bench_http import serving
from benchmarks.common import settle
from hybridrt import LLM
from hybridrt.server.run import SWITCH_SECONDS
sys.setswitchinterval(SWITCH_SECONDS)
with LLM(sys.argv[1], load_format="dummy", **json.loads(sys.argv[2])) as llm, serving(llm, False) as (url, *_):
    settle()
    print("serves", url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def server(tree: Path, model: Path, options: dict[str, object]) -> Iterator[str]:
    """A server's URL."""
    command = [sys.executable, "-c", SERVER, str(model), json.dumps(options)]
    with subprocess.Popen(command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            if line.startswith("serves "):
                yield line.split()[1]
                break
        else:
            raise SystemExit(f"the server of {tree} has ended; its messages are above")
        process.stdin.close()


def row(load: str, timings: Sequence[Timing]) -> dict[str, float | str]:
    """Times in milliseconds."""
    done = [t for t in timings if t.error is None and t.gains]
    first, gaps = [1e3 * t.first for t in done], [1e3 * gap for t in done for gap in t.between]
    return {
        "load": load,
        "failed": len(timings) - len(done),
        "seconds": max(t.end for t in timings),
        "tokens/s": sum(t.output_tokens for t in done) / max(t.end for t in timings),
        "first mean": sum(first) / max(len(first), 1),
        **{f"first p{share}": percentile(first, share) for share in (50, 90, 99, 100)},
        **{f"between p{share}": percentile(gaps, share) for share in (50, 90, 99)},
        "short p99": percentile([1e3 * t.first for t in done if t.prompt_tokens < SHORT], 99),
    }


def play(target: Target, load: str, seed: int = 0) -> dict[str, float | str]:
    """A load on a server."""
    workload, concurrency = chosen(load, seed)[load]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        timings = runner.run(run_load(target, make_work(workload), concurrency)).timings
    for error in sorted({t.error for t in timings if t.error is not None})[:3]:
        print(f"failed: {error}", file=sys.stderr)
    return row(load, timings)


def shown(found: dict[str, float | str]) -> str:
    return (
        "| " + " | ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in found.values()) + " |"
    )


def trees(text: str) -> list[Path]:
    return [Path(tree).resolve() for tree in text.split(",")]


def together(args: argparse.Namespace) -> None:
    """Runs this for each checkout, all at the same time."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(args.tree)
    if not share:
        raise SystemExit(f"{len(args.tree)} checkouts need as many cores, there are {len(cores)}")
    command = [sys.executable, "-m", "benchmarks.bench_traffic", str(args.model), "--targets", args.targets]
    command += ["--loads", args.loads, "--seeds", args.seeds, "--engine", json.dumps(args.engine)]
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        running = []
        for i, tree in enumerate(args.tree):
            os.sched_setaffinity(0, cores[i * share : (i + 1) * share])  # the next process inherits it
            own = [*command, "--tree", str(tree), *(["--name", f"{args.name}-{i}"] if args.name else [])]
            variables = os.environ | {"CUDA_VISIBLE_DEVICES": str(i)}
            process = subprocess.Popen(own, env=variables, stdout=subprocess.PIPE, text=True)
            running.append(stack.enter_context(process))
        for tree, process in zip(args.tree, running, strict=True):
            print(f"{tree}\n{process.communicate()[0]}", flush=True)
    if any(process.returncode for process in running):
        raise SystemExit("a server has ended; its messages are above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with a config.json")
    parser.add_argument("--targets", default="none,auto", help="values of target_itl_ms: none, auto, milliseconds")
    parser.add_argument("--loads", default=ALL, help=f"{ALL}, or some of {','.join(SUITE)}")
    parser.add_argument("--tree", type=trees, default=[HERE], help="the checkouts that serve, A or A,B")
    parser.add_argument("--seeds", default="0", help="each plays all loads")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON object: more options of LLM")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    args = parser.parse_args()
    if len(args.tree) > 1:
        together(args)
        return
    loads = list(SUITE) if args.loads == ALL else args.loads.split(",")
    print(environment(), flush=True)
    rows = []
    for target in args.targets.split(","):
        value = None if target == "none" else target if target == "auto" else float(target)
        with server(args.tree[0], args.model.resolve(), {"target_itl_ms": value, **args.engine}) as url:
            for seed in map(int, args.seeds.split(",")):
                for load in loads:
                    asked = Target(url, "m", None, {"return_token_ids": True, "temperature": 1.0})
                    rows.append({"target": target, "seed": seed} | play(asked, load, seed))
                    if len(rows) == 1:
                        print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
                    print(shown(rows[-1]), flush=True)
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
