"""What HTTP costs compared with the engine alone: throughput, first token and time between tokens, in turns.

    python -m benchmarks.bench_http                                        a double of a device, on any machine
    python -m benchmarks.bench_http --model benchmarks/configs/falcon-h1-7b   a model with random weights, on a GPU

Both run the same closed loop of requests, and a Poisson process at 80% of the engine's rate. `--tokens-per-second`
gives that rate and leaves the closed loop out. The client is a process of its own. The double waits as a device would,
`--step-ms` a step (`--prompt-step-ms` with a prompt in it), and its host does the work of a real step.

With `--stamps` it has the time between tokens at each point within the server, too (benchmarks/http_stamps.py).

The output has times, the CPU time of each thread for a token (waiting for a device may count), the share of its time
that the client computed, and the time from `submit` until the first token is written. Each round goes to stderr as it
ends. The client's time to the first token has the connection, the request's parsing and the client itself in addition.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from benchmarks.bench_host import VOCAB, build
from benchmarks.common import save, settle
from benchmarks.http_stamps import Stamps
from hybridrt import LLM
from hybridrt.bench.engine_load import run_engine
from hybridrt.bench.timing import summary
from hybridrt.bench.workload import WorkloadConfig, make_work
from hybridrt.engine.api import engine_loop
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.engine_loop import StepMessage
from hybridrt.server.app import make_app
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.core.service import Service
from hybridrt.server.run import SWITCH_SECONDS, Server


class Device:
    """Runs steps one after another, each for so long, while the host works; one with a prompt for `prompt_seconds`."""

    def __init__(self, executor: Any, seconds: float, prompt_seconds: float) -> None:
        self._launch, self._free_at = executor.launch, 0.0
        self._seconds, self._prompt_seconds = seconds, prompt_seconds

    def launch(self, plan: Any) -> Any:
        handle = self._launch(plan)
        seconds = self._prompt_seconds if plan.extend else self._seconds
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        done, result = self._free_at, handle.result

        def wait() -> Any:
            time.sleep(max(done - time.perf_counter(), 0))
            return result()

        handle.result, handle.ready = wait, lambda: time.perf_counter() >= done
        return handle


def run_on_double(llm: LLM, seconds: float, prompt_seconds: float) -> None:
    """Steps take so long, and one is launched while another one runs, as on a GPU."""
    executor: Any = llm.engine.executor
    executor.launch = Device(executor, seconds, prompt_seconds).launch
    llm.engine._max_in_flight = 1


class Watch:
    """Sees what a server does: seconds to each first token, and the CPU time of its threads."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.firsts: list[float] = []
        self._llm, self._begun = llm, set[str]()
        llm.watchers.append(self._note)

    def _note(self, message: StepMessage) -> None:
        now = time.monotonic()
        for delta in message.deltas:
            if delta.request_id not in self._begun and (stream := self._llm.stream_of(delta.request_id)) is not None:
                self._begun.add(delta.request_id)
                self.firsts.append(now - stream.arrival)

    @staticmethod
    def cpu_seconds() -> dict[str, float]:
        """Of the event loop's thread and the engine's."""
        threads = {thread.name: thread.ident for thread in threading.enumerate() if thread.ident is not None}
        of = {"loop": "event-loop", "engine": "hybridrt-engine"}
        return {key: time.clock_gettime(time.pthread_getcpuclockid(threads[name])) for key, name in of.items()}


@contextmanager
def serving(llm: LLM, noting: bool) -> Iterator[tuple[str, Watch, Stamps]]:
    """A server over an LLM, in a thread: its URL, and what it does; with `noting`, also when tokens are where."""
    with AsyncLLM(llm) as served:
        watch, stamps = Watch(served), Stamps(served)
        service = Service(served, ServerConfig(port=0, served_model_names=("m",), access_log=False, stats_interval=0))
        server = Server(make_app(service, Metrics(served, "m")), service)
        thread = threading.Thread(target=server.run, name="event-loop")
        thread.start()
        while not service.ready:
            time.sleep(0.01)
        watch.firsts.clear()  # those of the warm-up
        with stamps.noting() if noting else nullcontext():
            yield server.addresses()[0], watch, stamps
        server.handle_exit(15, None)
        thread.join()


def over_http(url: str, config: WorkloadConfig, concurrency: int | None, text: bool) -> dict[str, Any]:
    """What a client of its own process measures. Without `text` (no tokenizer), chunks come for token ids alone."""
    extra = {"temperature": 1.0} | ({} if text else {"return_token_ids": True})
    command = [
        sys.executable, "-m", "hybridrt", "bench", "serve", url, "--json", "--requests", str(config.requests),
        "--prompt-tokens", str(config.prompt_tokens), "--output-tokens", str(config.output_tokens),
        "--vocab", str(config.vocab), "--extra-body", json.dumps(extra),
        *(["--concurrency", str(concurrency)] if concurrency else []),
        *(["--rate", str(config.rate)] if config.rate else []),
    ]  # fmt: skip
    found: dict[str, Any] = json.loads(subprocess.check_output(command))
    return found


def figures(found: dict[str, Any]) -> dict[str, float]:
    """What is compared."""
    return {
        "tokens_per_second": found["output_tokens_per_second"],
        "first_p50_ms": found["time_to_first_token_ms"]["p50"],
        "between_p50_ms": found["inter_token_latency_ms"]["p50"],
        "between_p99_ms": found["inter_token_latency_ms"]["p99"],
    }


def alone(llm: LLM, config: WorkloadConfig, concurrency: int | None) -> dict[str, float]:
    """The load on the engine of this process."""
    settle()  # as a server does
    cpu = time.thread_time()
    found = summary(run_engine(llm, make_work(config), concurrency, temperature=1.0))
    return figures(found) | {"engine_us_per_token": 1e6 * (time.thread_time() - cpu) / found["output_tokens"]}


def served(llm: LLM, config: WorkloadConfig, concurrency: int | None, noting: bool) -> dict[str, float]:
    """The load on a server."""
    with serving(llm, noting) as (url, watch, stamps):
        before = watch.cpu_seconds()
        found = over_http(url, config, concurrency, llm.tokenizer is not None)
        spent = {name: end - before[name] for name, end in watch.cpu_seconds().items()}
    return (
        figures(found)
        | {f"{name}_us_per_token": 1e6 * seconds / found["output_tokens"] for name, seconds in spent.items()}
        | {"first_p50_in_server_ms": 1e3 * statistics.median(watch.firsts)}
        | {"client_cpu_share": found["client_cpu_share"]}
        | (stamps.figures() if noting else {})
    )


def compare(
    llm: LLM, config: WorkloadConfig, concurrency: int | None, rounds: int, noting: bool
) -> list[dict[str, Any]]:
    """Medians over rounds in turns."""
    found: dict[str, list[dict[str, float]]] = {"engine": [], "http": []}
    for _ in range(rounds):
        found["engine"].append(alone(llm, config, concurrency))
        found["http"].append(served(llm, config, concurrency, noting))
        print(json.dumps({way: each[-1] for way, each in found.items()}), file=sys.stderr, flush=True)
    rows = []
    for way, each in found.items():
        medians = {name: statistics.median(row[name] for row in each) for name in each[0]}
        rows.append({"way": way, "rate": config.rate, "concurrency": concurrency, **medians})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a config.json; none: a double of a device")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=7.0, help="of the double")
    parser.add_argument("--prompt-step-ms", type=float, default=13.0, help="of the double, if a prompt is in it")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens-per-second", type=float, help="of the closed loop, which is then left out")
    parser.add_argument("--switch-ms", type=float, default=1000 * SWITCH_SECONDS, help="of the interpreter lock")
    waits = "that the engine's thread waits at most"
    parser.add_argument("--hand-out-ms", type=float, default=1000 * engine_loop.HAND_OUT_SECONDS, help=waits)
    parser.add_argument("--stamps", action="store_true", help="note where the time goes within the server")
    args = parser.parse_args()
    sys.setswitchinterval(args.switch_ms / 1000)
    engine_loop.HAND_OUT_SECONDS = args.hand_out_ms / 1000
    with ExitStack() as stack:
        if args.model:
            llm = stack.enter_context(LLM(args.model, load_format="dummy", max_running_requests=args.streams))
        else:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            llm = stack.enter_context(build(directory, args.streams, 2 * args.prompt, 2 * args.output, text=True))
            run_on_double(llm, args.step_ms / 1000, args.prompt_step_ms / 1000)
        closed = WorkloadConfig(
            requests=4 * args.streams, prompt_tokens=args.prompt, output_tokens=args.output, vocab=VOCAB
        )
        rows = [] if args.tokens_per_second else compare(llm, closed, args.streams, args.rounds, args.stamps)
        rate = 0.8 * (args.tokens_per_second or rows[0]["tokens_per_second"]) / args.output
        open_loop = WorkloadConfig(
            requests=4 * args.streams, prompt_tokens=args.prompt, output_tokens=args.output, vocab=VOCAB, rate=rate
        )
        rows += compare(llm, open_loop, None, args.rounds, args.stamps)
    for row in rows:
        print(json.dumps(row))
    print(save(f"http-{args.streams}", rows))


if __name__ == "__main__":
    main()
