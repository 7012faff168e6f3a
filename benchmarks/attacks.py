"""What one client can do to another: times of a neighbour's short requests, quiet and while a server is attacked.

    python -m benchmarks.attacks                                  every case, 30 s quiet and 30 s attacked each
    python -m benchmarks.attacks --attack pipeline --seconds 10   one case (benchmarks/attack_cases.py has them all)
    python -m benchmarks.attacks --file my.json                   cases of a file (`read_cases` has its form)

Each case has a server of its own, on the loopback address, with the built-in model; those with images have one that
sees (benchmarks/seeing_model.py), and the two clients then have different keys. The attacker is a process that takes
at most `--share` of a core. The neighbour streams completions, and sends chats, requests with new forms and, to a model
that sees, chats with a small picture, one after another. The table has the 99th percentiles of its times, and their
ratio. "Failed" counts requests of the neighbour that were refused or broke off. Then come the server's CPU time and its
largest memory, and what the attacker got.
"""

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.attack_cases import ATTACKER, NEIGHBOUR, Attack, cases, read_cases
from benchmarks.attack_clients import Neighbour, attack
from benchmarks.attack_images import cases_of_images, small_picture
from benchmarks.seeing_model import write_seeing_model

START_SECONDS, STOP_SECONDS = 120.0, 10.0
MAX_SECONDS = 3600.0
_SERVES = re.compile(r"serving .* on http://([\d.]+):(\d+)")


class Served(NamedTuple):
    """A server of its own process."""

    address: tuple[str, int]
    process: psutil.Process

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def peak_mib(self) -> int:
        """The most memory that it has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) // 1024


@contextmanager
def serving(options: list[str], sees: bool = False) -> Iterator[Served]:
    """`hybridrt serve` with the built-in model, or with one that sees."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"--api-key={key}" for key in (ATTACKER, NEIGHBOUR)]
        model = [str(write_seeing_model(Path(folder))), "--load-format", "dummy", *keys] if sees else []
        with _started([*model, *options]) as served:
            yield served


@contextmanager
def _started(options: list[str]) -> Iterator[Served]:
    command = [sys.executable, "-m", "hybridrt", "serve", "--port", "0", "--no-access-log", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Served(_wait_for(process, log), psutil.Process(process.pid))
        finally:
            for end in (process.terminate, process.terminate, process.kill):
                end()
                try:
                    process.wait(STOP_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue


def _wait_for(process: subprocess.Popen[bytes], log: Any) -> tuple[str, int]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        if found := _SERVES.search(log.read()):
            return found[1], int(found[2])
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"the server did not start:\n{log.read()[-2000:]}")


def measure(case: Attack, seconds: float, share: float, options: list[str]) -> dict[str, Any]:
    """A case: times of the neighbour without it and with it, and what it cost the server."""
    with serving(options, case.sees) as served:
        neighbour = partial(Neighbour, served.address, small_picture() if case.sees else None)
        neighbour().run(1.0)  # warms up
        quiet, attacked = neighbour(), neighbour()
        quiet.run(seconds)
        before, began = served.cpu_seconds(), time.monotonic()
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            got = pool.apply_async(attack, (case, served.address, seconds + 2.0, share))
            time.sleep(1.0)  # the attacker has begun
            attacked.run(seconds)
            cores = (served.cpu_seconds() - before) / (time.monotonic() - began)
            return {
                "attack": case.name, "times": compare(quiet.times, attacked.times),
                "failed": dict(attacked.failures), "failed_quiet": dict(quiet.failures), "server_cores": cores,
                "server_peak_mib": served.peak_mib(), "attacker": got.get(seconds + 60.0),
            }  # fmt: skip


def compare(quiet: dict[str, list[float]], attacked: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds, the 99th percentiles; a measure that the attack let nobody take is infinite."""
    rows = {}
    for name, times in quiet.items():
        before = _p99(times)
        after = _p99(attacked[name]) if name in attacked else float("inf")
        rows[name] = {"quiet": before, "attacked": after, "ratio": after / before}
    return rows


def _p99(times: list[float]) -> float:
    return 1000 * float(np.percentile(times, 99))


def show(result: dict[str, Any]) -> str:
    """Lines of the table, and what else was seen."""
    lines = [
        f"| {result['attack']} | {name} | {row['quiet']:.1f} | {row['attacked']:.1f} | {row['ratio']:.1f} |"
        for name, row in result["times"].items()
    ]
    got = result["attacker"]
    lines.append(
        f"    {result['server_cores']:.2f} cores, peak {result['server_peak_mib']} MiB; attacker: {got['sent']} sent, "
        f"{got['cpu_share']:.2f} of a core, answers {got['statuses']}; neighbour failed: {result['failed'] or 'never'}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measures the chosen cases, and writes a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attack", action="append", metavar="NAME", help="a case; repeatable; default: all")
    parser.add_argument("--file", help="JSON file of further cases")
    parser.add_argument("--seconds", type=float, default=30.0, help="quiet, and attacked")
    parser.add_argument("--share", type=float, default=0.3, help="of a core, for the attacker")
    parser.add_argument("--serve-option", action="append", default=[], metavar="TEXT", help="of hybridrt serve")
    parser.add_argument("--output", help="JSON file for the results")
    chosen = parser.parse_args(arguments)
    if not (0 < chosen.seconds <= MAX_SECONDS and 0 < chosen.share <= 1):
        parser.error(f"--seconds must be above 0 and at most {MAX_SECONDS:g}, --share above 0 and at most 1")
    known = {
        case.name: case for case in [*cases(), *cases_of_images(), *(read_cases(chosen.file) if chosen.file else [])]
    }
    if unknown := set(chosen.attack or ()) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    print("| attack | 99th percentile of | quiet, ms | attacked, ms | ratio |\n|---|---|---:|---:|---:|", flush=True)
    results = []
    for name in chosen.attack or known:
        results.append(measure(known[name], chosen.seconds, chosen.share, chosen.serve_option))
        print(show(results[-1]), flush=True)
    if chosen.output:
        Path(chosen.output).write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
