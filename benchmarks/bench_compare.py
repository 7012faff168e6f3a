"""Two checkouts side by side: the same benchmark in turns on one machine, the median of each figure and their ratio.

    python -m benchmarks.bench_compare ../other-checkout benchmarks/configs/falcon-h1-7b --offline="--batches 1,128"

What `--offline` says goes to `benchmarks.bench_offline` of either checkout. Each loads its model once, in a process of
its own that sees half of a GPU's memory. They measure in turns: other checkout, this one, this one, other checkout, and
so on, so that a drift of the machine's clocks meets both. A process that waits for its turn runs nothing on the GPU.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common import environment, save

HERE = Path(__file__).parents[1]
# Runs bench_offline of the checkout that it starts in, which may be an old one: builds its LLM, then measures once for
# each line of its input and answers with the rows.
WORKER = """
import json, sys, torch
from benchmarks import bench_offline
facts, measure = torch.cuda.mem_get_info, bench_offline.measure
def half(device=None):
    free, total = facts(device)
    return min(free, total // 2 - torch.cuda.memory_reserved(device)), total // 2
def turns(args, llm):
    for line in sys.stdin:
        found = {row["what"]: row.get("ms", row["tok/s"]) for row in measure(args, llm)}
        print(json.dumps({"rows": found}), flush=True)
    return []
torch.cuda.mem_get_info, bench_offline.measure = half, turns
bench_offline.main()
"""


class Worker:
    """A checkout's benchmark, with its model loaded."""

    def __init__(self, checkout: Path, model: Path, options: list[str]) -> None:
        self.checkout, self._log = checkout, tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-c", WORKER, str(model), "--repeats", "1", *options]
        self._process = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def measure(self) -> dict[str, float]:
        """Milliseconds of decode steps, tokens per second of prefills, by name."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: what follows says why
            self._process.stdin.write("measure\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"rows"'):
                rows: dict[str, float] = json.loads(line)["rows"]
                return rows
        self._log.seek(0)
        raise SystemExit(f"the benchmark failed in {self.checkout}:\n{self._log.read()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(other: list[dict[str, float]], ours: list[dict[str, float]]) -> list[dict[str, Any]]:
    """A row a figure: both medians, and how many times as fast this checkout is."""
    rows = []
    for what in ours[0]:
        before, now = (statistics.median(run[what] for run in runs) for runs in (other, ours))
        faster = now / before if what.startswith("prefill") else before / now
        rows.append({"what": what, "other": before, "this": now, "speed": faster})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    parser.add_argument("--offline", type=shlex.split, default=[], help="options of benchmarks.bench_offline")
    args = parser.parse_args()
    workers = [Worker(path, args.model.resolve(), args.offline) for path in (args.other.resolve(), HERE)]
    runs: list[list[dict[str, float]]] = [[], []]
    try:
        for i in range(args.runs):
            for side in (1, 0) if i % 2 else (0, 1):
                runs[side].append(workers[side].measure())
    finally:
        for worker in workers:
            worker.close()
    rows = compare(*runs)
    print(environment())
    for row in rows:
        print(f"{row['what']:24} {row['other']:12.3f} {row['this']:12.3f}  {row['speed']:7.1%} of the other's speed")
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
