"""Time between tokens of running answers while long prompts come, with one server and with servers of roles.

    python -m benchmarks.bench_roles benchmarks/configs/falcon-h1-7b --options "--load-format dummy"
    python -m benchmarks.bench_roles embedded --servers pair --prompt 400 --options "--device cpu --max-model-len 1024"

`one` is a server on the first GPU; `pair` is a prefill server on the first GPU and a decode server on the second one
(extra `transfer`). Each runs the same streams twice, alone and with prompts of `--prompt` tokens every `--every`
seconds. The client is this process.
"""

import argparse
import asyncio
import json
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.common import environment, save
from benchmarks.fleet_processes import QUIET, START_SECONDS, Process, metric
from hybridrt.bench.http_load import Target, run_load
from hybridrt.bench.timing import Timing, summary
from hybridrt.bench.workload import Work, WorkloadConfig, make_work
from hybridrt.channel.keys import FLEET_VARIABLE
from hybridrt.transfer import keys

LATER = 1.0  # seconds after the streams, the first long prompt comes


@contextmanager
def running(kind: str, model: str, options: Sequence[str], transfer_bytes: int) -> Iterator[str]:
    """The URL that clients call."""
    shared = {FLEET_VARIABLE: secrets.token_hex(32), keys.VARIABLE: secrets.token_hex(32)}
    command = ["-m", "hybridrt", "serve", model, "--served-model-name", "model", *QUIET, *options]
    arena = ["--transfer-bytes", str(transfer_bytes)]
    if kind == "one":
        started = [Process(command, {"CUDA_VISIBLE_DEVICES": "0"})]
    else:
        prefill = Process([*command, *arena, "--role", "prefill"], shared | {"CUDA_VISIBLE_DEVICES": "0"})
        roles = ["--role", "decode", "--prefill-url", prefill.url]
        started = [prefill, Process([*command, *arena, *roles], shared | {"CUDA_VISIBLE_DEVICES": "1"})]
    with ExitStack() as stack:
        for process in started:
            stack.callback(process.end)
            process.start()
        for process in started:
            process.wait_until_ready()
        if kind == "pair":
            _wait_for_prefill(started[1].url)
        yield started[-1].url


def _wait_for_prefill(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while metric(url, "hybridrt:prefill_workers") < 1:
        if time.monotonic() > deadline:
            raise SystemExit("the decode server does not find the prefill server")
        time.sleep(0.2)


def streams(args: argparse.Namespace, seed: int) -> list[Work]:
    return make_work(WorkloadConfig(
        requests=args.streams, prompt_tokens=args.short, output_tokens=args.output, fixed=True, seed=seed
    ))  # fmt: skip


def long_prompts(args: argparse.Namespace, count: int, seed: int) -> list[Work]:
    made = make_work(WorkloadConfig(requests=count, prompt_tokens=args.prompt, output_tokens=1, fixed=True, seed=seed))
    return [Work(w.prompt, w.max_tokens, w.seed, LATER + i * args.every) for i, w in enumerate(made)]


def play(url: str, work: Sequence[Work]) -> list[Timing]:
    target = Target(url, "model", extra={"temperature": 0, "return_token_ids": True})
    timings = asyncio.run(run_load(target, work, None)).timings
    if errors := {timing.error for timing in timings if timing.error}:
        raise SystemExit(f"requests have failed: {errors}")
    return timings


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    with running(kind, args.model, shlex.split(args.options), args.transfer_bytes) as url:
        play(url, [*streams(args, 1)[:2], *long_prompts(args, 1, 2)])  # kernels, allocators, connections
        quiet = summary(play(url, streams(args, 3)))["inter_token_latency_ms"]
        timings = play(url, [*streams(args, 4), *long_prompts(args, args.prompts, 5)])
        fetched = metric(url, "hybridrt:prompts_fetched_total") if kind == "pair" else 0.0
    running_streams, prompts = timings[: args.streams], timings[args.streams :]
    loaded, last = summary(running_streams)["inter_token_latency_ms"], max(timing.end for timing in running_streams)
    return {
        "servers": kind, "quiet": quiet, "with prompts": loaded, "p99 ratio": loaded["p99"] / quiet["p99"],
        "first token of a prompt": summary(prompts)["time_to_first_token_ms"],
        "prompts while streams ran": sum(timing.end < last for timing in prompts), "fetched": fetched,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    quiet, loaded, first = row["quiet"], row["with prompts"], row["first token of a prompt"]
    print(
        f"{row['servers']:>5}: between tokens p50 {quiet['p50']:.2f}, p99 {quiet['p99']:.2f} ms; with prompts p50 "
        f"{loaded['p50']:.2f}, p99 {loaded['p99']:.2f} ms ({row['p99 ratio']:.2f} times); first token of a prompt "
        f"{first['mean']:.0f} ms; {row['prompts while streams ran']} prompts while streams ran",
        flush=True,
    )


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory or hub name, or a directory with config.json")
    parser.add_argument("--servers", nargs="+", choices=("one", "pair"), default=["pair", "one"])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--short", type=int, default=128, help="tokens of a stream's prompt")
    parser.add_argument("--output", type=int, default=1024, help="tokens of a stream")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of a long prompt")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--every", type=float, default=1.5, help="seconds from one long prompt to the next")
    parser.add_argument("--transfer-bytes", type=int, default=2**33, help="of a server with a role")
    parser.add_argument("--options", default="", help="of `hybridrt serve`, as one text")
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    return parser.parse_args(given)


def main() -> None:
    args, rows = parse(), list[dict[str, Any]]()
    for kind in args.servers:
        rows.append(measure(kind, args))
        show(rows[-1])
    print(json.dumps({"rows": rows, "environment": environment()}))
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
