"""Servers of several engines under the same client, one after the other, each alone on the GPU and the host.

    python -m benchmarks.bench_engines benchmarks/configs/falcon-h1-7b --batches 1,32,128 --prefill 1x8192 \\
        --loads 10/s,saturated --results benchmarks/results/engines \\
        --engine "hybridrt=hybridrt serve {model} --port {port} --served-model-name m --load-format dummy" \\
        --engine "vllm=vllm serve {model} --port {port} --served-model-name m --load-format dummy"

A command may begin with `env PYTHONPATH=...`, so that each engine has the packages that it asks for. The model is its
config.json and a tokenizer of made-up words for each token; each engine fills the weights with its own random numbers.
The client sends token ids, greedily, and no prompt twice.

A decode step is (time of a batch at 144 tokens - time at 16 tokens) / 128, the median of --repeats after one that does
not count; these answers are not streamed. Loads are those of `hybridrt bench serve --suite`, streamed. RESULTS gets a
JSON file and the server's log for each engine and model.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.bench_offline import FIRST, LAST, shapes, sizes
from benchmarks.bench_traffic import play, shown
from benchmarks.common import environment, prompts
from hybridrt.bench.http_load import Target
from hybridrt.bench.suites import ALL, SUITE, VOCAB

PORT, START_SECONDS, ANSWER_SECONDS, END_SECONDS = 8123, 900, 300, 30


def write_model(config: Path, folder: Path) -> None:
    """A checkpoint without weights: the config, and a tokenizer with a word for each token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    shutil.copy(config / "config.json", folder)
    size = json.loads((config / "config.json").read_text())["vocab_size"]
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))  # type: ignore[arg-type]
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "pad_token": "w1", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


class Client:
    """Sends batches to a server. Each has a seed of its own, so that no prompt comes twice."""

    def __init__(self, url: str) -> None:
        self.url, self._batches = url, 0

    def answer(self, prompt: list[int], tokens: int) -> None:
        """Waits for a whole answer of `tokens` tokens."""
        fields = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(fields).encode(), head)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            came = json.load(response)["usage"]["completion_tokens"]
        if came != tokens:
            raise SystemExit(f"{tokens} tokens were asked for, {came} came")

    def seconds(self, count: int, length: int, tokens: int) -> float:
        """Seconds until `count` new prompts that are sent at once have their answers."""
        self._batches += 1
        batch = prompts(count, length, VOCAB, seed=self._batches)
        with ThreadPoolExecutor(count) as pool:
            start = time.perf_counter()
            list(pool.map(self.answer, batch, [tokens] * count))
            return time.perf_counter() - start

    def decode_ms(self, batch: int, context: int) -> float:
        """Milliseconds of a decode step of `batch` requests around `context` tokens of context."""
        length = context - (FIRST + LAST) // 2
        return (self.seconds(batch, length, LAST) - self.seconds(batch, length, FIRST)) / (LAST - FIRST) * 1e3


@contextmanager
def serving(command: str, model: Path, log: Path) -> Iterator[tuple[Client, float]]:
    """A server, and how many seconds it took to its first answer. Ends it and all that it started."""
    words = shlex.split(command.format(model=model, port=PORT))
    client, start = Client(f"http://127.0.0.1:{PORT}"), time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server has ended with status {process.returncode}; {log} says why")
            try:
                client.seconds(1, 8, 2)
                break
            except OSError as e:  # it does not listen, or does not answer yet
                if time.perf_counter() - start > START_SECONDS:
                    raise SystemExit(f"no answer in {START_SECONDS} s ({e}); {log} says why") from None
                time.sleep(0.5)
        yield client, time.perf_counter() - start
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError):  # what it has started may go on without it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_SECONDS)


def measure(client: Client, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps and prompts first: loads leave prefixes in a cache."""
    for batch in args.batches:
        client.decode_ms(batch, args.ctx)  # an engine may compile kernels for this size, or load them
        ms = statistics.median(client.decode_ms(batch, args.ctx) for _ in range(args.repeats))
        yield {"what": f"decode batch {batch}", "ms": round(ms, 3)}
    for count, length in args.prefill:
        client.seconds(count, length, 1)
        seconds = statistics.median(client.seconds(count, length, 1) for _ in range(args.repeats))
        yield {"what": f"prefill {count}x{length}", "tok/s": round(count * length / seconds)}
    for load in args.loads:
        yield play(Target(client.url, "m", None, {"temperature": 0.0, **args.extra}), load)


def engine(text: str) -> tuple[str, str]:
    name, _, command = text.partition("=")
    if not name.replace("-", "").isalnum() or "{model}" not in command or "{port}" not in command:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be NAME=COMMAND, and the command must name {{model}} and {{port}}"
        )
    return name, command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="directory with a config.json")
    parser.add_argument("--engine", type=engine, action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--batches", type=sizes, default=[1, 32, 128])
    parser.add_argument("--prefill", type=shapes, default=[(1, 8192)])
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of context around which decode is measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loads", type=lambda text: [name for name in text.split(",") if name], default=[])
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object: more fields of a load's requests")
    parser.add_argument("--results", type=Path, help="directory for figures and logs. [a temporary one]")
    args = parser.parse_args()
    args.loads = list(SUITE) if args.loads == [ALL] else args.loads
    return args


def main() -> None:
    args = parse()
    results = args.results or Path(tempfile.mkdtemp(prefix="engines-"))
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.config, Path(folder))
        for name, command in args.engine:
            stem = results / f"{args.config.name}-{name}"
            rows = list[dict[str, Any]]()
            with serving(command, Path(folder), Path(f"{stem}.log")) as (client, seconds):
                facts = {"environment": environment(), "command": command, "start_seconds": round(seconds, 1)}
                print(f"{name}: first answer after {seconds:.1f} s", flush=True)
                for each in measure(client, args):
                    rows.append(each)
                    print(name, shown(each), flush=True)
                    Path(f"{stem}.json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
