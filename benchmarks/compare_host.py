"""Host time of an engine step compared with another checkout's, in turns.

    git archive 90fb57c0 | tar x -C /tmp/before
    python benchmarks/compare_host.py /tmp/before [--turns 60] [--rows 1,32,256]

The doubles are those of `bench_host.py` of each checkout: model, backend, graphs and sampler return
at once. Both checkouts run at the same time, in a process each, and take turns of STEPS steps in
which all requests decode. A turn's figure is the median of the CPU times of its steps. The table
has the medians over turns, and the median of the turns' ratios.
"""

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
STEPS, CONTEXT = 20, 1000


def serve(rows: int, turns: int) -> None:
    """Prints the milliseconds of a step of `rows` requests for each line of standard input, with
    the `benchmarks.bench_host` that is found first."""
    bench = importlib.import_module("benchmarks.bench_host")
    bench.torch.set_num_threads(1)
    steps = STEPS * (turns + 1)
    params = bench.SamplingParams(max_tokens=steps + 32, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory, bench.build(directory, rows, CONTEXT, steps) as llm:
        engine = llm.engine
        for row in range(rows):
            engine.add_request([3 + row % 500] * CONTEXT, params, stream=False)
        while engine.counters().waiting or engine.counters().output_tokens < 4 * rows:
            engine.step()
        bench.settle()
        for _ in sys.stdin:
            with bench.Interrupts():
                print(statistics.median(step_seconds(engine) for _ in range(STEPS)) * 1e3, flush=True)


def step_seconds(engine: object) -> float:
    start = time.thread_time()
    engine.step()  # type: ignore[attr-defined]
    return time.thread_time() - start


def compare(other: Path, rows: int, turns: int) -> list[tuple[float, float]]:
    """Milliseconds of a step there and here, by turn. The first turn warms up."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(rows), "--turns", str(turns)]
    servers = [
        subprocess.Popen(
            command, cwd=each, env=os.environ | {"PYTHONPATH": str(each)}, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
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
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, args.turns)
    if args.other is None:
        parser.error("name the other checkout")
    for rows in args.rows:
        pairs = compare(args.other, rows, args.turns)
        there, here = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = statistics.median(here / there for there, here in pairs)
        print(f"{rows:4} rows: {there:.3f} ms there, {here:.3f} here, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
