"""Two checkouts side by side: the same benchmark in turns on one machine, the median of each figure and their ratio.

    python -m benchmarks.bench_compare ../other-checkout benchmarks/configs/falcon-h1-7b --offline="--batches 1,128"

What `--offline` says goes to `benchmarks.bench_offline`, which runs in a process of its own in either checkout: other
checkout, this one, this one, other checkout, and so on, so that a drift of the machine's clocks meets both.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import environment, save

HERE = Path(__file__).parents[1]
NAME = f"compare-run-{os.getpid()}"  # comparisons of other models may run beside this one


def run(checkout: Path, model: Path, options: list[str]) -> dict[str, float]:
    """One run of bench_offline in a checkout: milliseconds of decode steps, tokens per second of prefills, by name."""
    command = [sys.executable, "-m", "benchmarks.bench_offline", str(model), "--name", NAME, "--repeats", "1", *options]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{done.stderr[-3000:]}")
    path = checkout / "benchmarks" / "results" / f"{NAME}.json"
    rows = json.loads(path.read_text())["rows"]
    path.unlink()
    return {row["what"]: row.get("ms", row["tok/s"]) for row in rows}


def compare(other: list[dict[str, float]], ours: list[dict[str, float]]) -> list[dict[str, Any]]:
    """A row a figure: both medians, and how many times as fast this checkout is."""
    rows = []
    for what in ours[0]:
        before, now = (statistics.median(run[what] for run in runs) for runs in (other, ours))
        faster = before / now if what.startswith("decode") else now / before
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
    runs: dict[Path, list[dict[str, float]]] = {args.other.resolve(): [], HERE: []}
    for i in range(args.runs):
        for checkout in list(runs)[:: -1 if i % 2 else 1]:
            runs[checkout].append(run(checkout, args.model.resolve(), args.offline))
    rows = compare(*runs.values())
    print(environment())
    for row in rows:
        print(f"{row['what']:24} {row['other']:12.3f} {row['this']:12.3f}  {row['speed']:7.1%} of the other's speed")
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
