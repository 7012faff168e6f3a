"""What the prefix cache saves: tokens, time to the first token and throughput, with it and without it.

    python -m benchmarks.bench_prefix benchmarks/configs/falcon-h1-7b --trace chat --load 0.6 --units 16 --turns 8 \
        --prompt 1500 --output 500 --alone

First the whole trace at once, without the cache: that is the saturated rate. Then its conversations arrive as a Poisson
process at a share (`--load`) of that rate, and the same with the cache. The hit rate is the share of prompt tokens that
needed no computing. Beside it stands what a clairvoyant cache could have had with the same memory
(benchmarks.prefix_bound), and with unlimited memory. `redone` are tokens that a request computed although an earlier
one had them, on average and at most. Weights are seeded random numbers from config.json alone; MODEL "embedded" is the
built-in model. `--limit` bounds each run: after so many seconds no request is sent any more. `--runs` chooses
runs, so that several commands can share them; those at a load then need `--rate`, which the first run prints.
"""

import argparse
import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import prefix_bound, traces
from benchmarks.bench_serving import percentile
from benchmarks.common import environment, free, save, settle
from benchmarks.prefix_bound import Served
from benchmarks.traces import TRACES, Item, Shape
from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.dtypes import DTYPES
from hybridrt.base.errors import ConfigError
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.outputs import RequestMetrics
from hybridrt.mem_cache.prefix_tree.texts import in_common

RUNS = ("saturated-off", "load-off", "alone", "saturated-on", "load-on")  # in this order


@dataclass
class Ran:
    """A request of a trace that has ended: its texts, when it was due, and what the engine says of it."""

    item: Item
    prompt: list[int]
    answer: list[int]
    due: float
    metrics: RequestMetrics

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        assert self.metrics.first_token_time is not None
        return self.metrics.first_token_time - self.due

    def served(self) -> Served:
        m = self.metrics
        assert m.admission_time is not None and m.first_token_time is not None and m.finish_time is not None
        times = m.admission_time, m.first_token_time, m.finish_time
        tokens = np.array(self.prompt + self.answer, np.int32)
        return Served(tokens, len(self.prompt), *times, not m.retractions, self.item.salt)


class Clock(Protocol):
    """What `Player` needs of the module `time`."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class Player:
    """Sends a trace to an engine: each request once those before it have ended, and its delay is over.

    Args:
        alone: send only a prompt's new tokens: those after the longest beginning that it shares with an earlier
            request's text.
    """

    def __init__(
        self, engine: Engine, items: Sequence[Item], *, temperature: float = 1.0, alone: bool = False,
        clock: Clock = time,
    ) -> None:  # fmt: skip
        self._engine, self._temperature, self._alone, self._clock = engine, temperature, alone, clock
        self._numbers = {item.id: i for i, item in enumerate(items)}
        self._open = {item.id: set(item.after) for item in items}
        self._followers: dict[str, list[Item]] = {}
        for item in items:
            for name in item.after:
                self._followers.setdefault(name, []).append(item)
        self._due = [(item.delay, i, item) for i, item in enumerate(items) if not item.after]
        heapq.heapify(self._due)
        self._sent: dict[str, tuple[Item, list[int], float]] = {}
        self._answers: dict[str, list[int]] = {}
        self._whole: dict[str, tuple[str | None, np.ndarray]] = {}  # salts and whole prompts of what was sent alone

    def play(self, limit: float = math.inf) -> tuple[list[Ran], float]:
        """Runs everything; returns what has run, in order of its end, and the seconds until the last end. Nothing
        is sent any more once the first request was due `limit` seconds ago."""
        engine, clock, ran, start = self._engine, self._clock, list[Ran](), self._clock.monotonic()
        limit += self._due[0][0]
        while self._due or engine.has_unfinished():
            now = clock.monotonic() - start
            if self._answers and now > limit:
                self._due.clear()
            while self._due and self._due[0][0] <= now:
                due, _, item = heapq.heappop(self._due)
                self._send(item, start + due)
            if not engine.has_unfinished() and self._due:
                clock.sleep(max(self._due[0][0] - now, 0.0))
                continue
            for delta in engine.step():
                if delta.error is not None:
                    raise delta.error
                self._answers[delta.request_id] += delta.token_ids
                if delta.metrics is not None:
                    ran.append(self._end(delta.request_id, delta.metrics, clock.monotonic() - start))
        return ran, time.monotonic() - start

    def _send(self, item: Item, due: float) -> None:
        prompt = item.prompt(self._answers)
        if self._alone:
            whole = np.array(prompt, np.int32)
            prompt = prompt[self._known(item, whole) :]
            self._whole[item.id] = item.salt, whole
        params = SamplingParams(
            max_tokens=item.max_tokens, temperature=self._temperature, ignore_eos=True, seed=self._numbers[item.id],
            cache_salt=item.salt,
        )  # fmt: skip
        self._engine.add_request(prompt, params, item.id)
        self._sent[item.id], self._answers[item.id] = (item, prompt, due), []

    def _known(self, item: Item, prompt: np.ndarray) -> int:
        """Tokens that `prompt` begins with and that stand in an earlier request's prompt and answer, all but one at
        most."""
        ids, longest = prompt[:-1], 0
        for name, (salt, whole) in self._whole.items():
            if salt == item.salt:
                same = in_common(ids, whole)
                if same == len(whole):
                    same += in_common(ids[same:], np.array(self._answers[name], np.int32))
                longest = max(longest, same)
        return longest

    def _end(self, name: str, metrics: RequestMetrics, now: float) -> Ran:
        for item in self._followers.get(name, ()):
            self._open[item.id].discard(name)
            if not self._open[item.id]:
                heapq.heappush(self._due, (now + item.delay, self._numbers[item.id], item))
        item, prompt, due = self._sent.pop(name)
        return Ran(item, prompt, self._answers[name], due, metrics)


def summary(name: str, ran: Sequence[Ran], seconds: float) -> dict[str, Any]:
    """One row: rates, hit rate, and milliseconds to the first token."""
    asked, hit = sum(len(r.prompt) for r in ran), sum(r.metrics.cached_tokens for r in ran)
    first, redone = [r.first for r in ran], recomputed(ran)
    return {
        "run": name, "requests/s": len(ran) / seconds, "tok/s": sum(len(r.answer) for r in ran) / seconds,
        "first token p50 ms": percentile(first, 50) * 1e3, "first token p99 ms": percentile(first, 99) * 1e3,
        "asked": asked, "hit": hit, "hit rate": hit / asked, "retractions": sum(r.metrics.retractions for r in ran),
        "redone mean": sum(redone) / len(redone), "redone max": max(redone),
    }  # fmt: skip


def recomputed(ran: Sequence[Ran]) -> list[int]:
    """Of each request, the tokens that it computed although a request admitted before had them."""
    served = [r.served() for r in ran]
    program = prefix_bound.program(served, 0, 1, 0)
    longest = program.lengths.amax(1).int().tolist() if program.lengths.numel() else [0] * len(ran)
    by_admission = sorted(ran, key=lambda r: r.metrics.admission_time or 0.0)
    return [int(most) - r.metrics.cached_tokens for most, r in zip(longest, by_admission, strict=True)]


def add_bounds(row: dict[str, Any], ran: Sequence[Ran], llm: LLM, slots: int) -> None:
    """Adds what could have been hit with the memory of `llm` (with `slots` state slots), and with any."""
    plan = llm.plan
    page_size = plan.page_size if plan.num_pages else 0
    program = prefix_bound.program([r.served() for r in ran], page_size, slots, plan.num_pages)
    row["bound"], row["unlimited"] = (hit / row["asked"] for hit in (prefix_bound.bound(program), program.unlimited))
    row["of bound"] = row["hit rate"] / row["bound"] if row["bound"] else 1.0


def show(row: dict[str, Any]) -> None:
    line = (f"{row['run']:>22} {row['requests/s']:8.2f} req/s {row['tok/s']:8.0f} tok/s   first token p50 "
            f"{row['first token p50 ms']:8.1f} p99 {row['first token p99 ms']:8.1f} ms")  # fmt: skip
    if "bound" in row:
        line += (f"   hit {row['hit rate']:.1%}, {row['of bound']:.1%} of the bound {row['bound']:.1%} (unlimited "
                 f"{row['unlimited']:.1%}); redone {row['redone mean']:.1f}, at most {row['redone max']}")  # fmt: skip
    print(line, flush=True)


def build(args: argparse.Namespace, *, prefix_cache: bool) -> LLM:
    embedded, drafter = args.model == "embedded", None
    if args.drafter:
        drafter = SpeculativeConfig(args.drafter, args.drafts, args.draft_model, topk=args.topk)
    llm = LLM(
        args.model, load_format="auto" if embedded else "dummy", device=args.device,
        max_running_requests=args.max_running, max_model_len=args.max_model_len, chunked_prefill_size=args.chunk,
        page_size=args.page_size, mamba_ssm_dtype=args.state_dtype, state_mode=args.state_mode,
        prefix_cache=prefix_cache, cache_slots=args.cache_slots if prefix_cache else None, speculative=drafter,
    )  # fmt: skip
    print(llm.plan.summary(), flush=True)
    settle()
    return llm


def make_items(args: argparse.Namespace, vocab: int) -> list[Item]:
    if args.file:
        return traces.read(args.file, vocab, args.block)[: args.most]
    shape = Shape(args.units, args.turns, args.prompt, args.output, vocab, args.seed)
    return TRACES[args.trace](shape)[: args.most]


def play(llm: LLM, name: str, items: Sequence[Item], args: argparse.Namespace, alone: bool = False) -> dict[str, Any]:
    """One run from an empty cache, shown; the second value of a hit rate only where the cache is on."""
    llm.reset_prefix_cache()
    ran, seconds = Player(llm.engine, items, temperature=args.temperature, alone=alone).play(args.limit)
    row = summary(name, ran, seconds)
    if llm.config.prefix_cache:
        add_bounds(row, ran, llm, llm.plan.num_slots)
    show(row)
    return row


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs asked for: saturated and at the load, without the cache and with it; the new tokens of turns alone."""
    found = dict[str, dict[str, Any]]()
    for on in (False, True):
        runs = [run for run in RUNS if run in args.runs and run.endswith("on") == on]
        if not runs:
            continue
        with build(args, prefix_cache=on) as llm:
            items = make_items(args, llm.model_config.vocab_size)
            play_warm(llm, items, args)
            for run in runs:
                found[run] = measure_run(llm, run, items, args)
                if run == "saturated-off":
                    args.rate = args.rate or found[run]["requests/s"]
                    print(f"--rate {args.rate:.4f}", flush=True)
        del llm
        free()
    compare(found)
    return list(found.values())


def measure_run(llm: LLM, run: str, items: Sequence[Item], args: argparse.Namespace) -> dict[str, Any]:
    if run.startswith("saturated"):
        now = [item if item.after else traces.replace(item, delay=0.0) for item in items]
        return play(llm, run.replace("-", ", "), now, args)
    if not args.rate:
        raise ConfigError("a run at a load needs --rate, or saturated-off among --runs")
    rate = args.rate * sum(not item.after for item in items) / len(items) * args.load
    timed = items if args.file else traces.arriving(items, rate, args.seed)
    if run == "alone":
        return play(llm, "new tokens alone", timed, args, alone=True)
    return play(llm, f"load {args.load:.0%}, {run[5:]}", timed, args)


def compare(found: Mapping[str, dict[str, Any]]) -> None:
    """Prints what the cache gains, of the runs that there are."""
    first = {run: row["first token p50 ms"] for run, row in found.items()}
    for a, b, what in (("load-on", "alone", "of new tokens alone"), ("load-off", "load-on", "with the cache")):
        if a in first and b in first:
            print(f"first token p50 at {a}: {first[a] / first[b]:.2f} times that {what}")
    if {"saturated-on", "saturated-off"} <= found.keys():
        rates = [found[f"saturated-{side}"]["tok/s"] for side in ("on", "off")]
        print(f"saturated throughput with the cache: {rates[0] / rates[1]:.2f} times that without")


def play_warm(llm: LLM, items: Sequence[Item], args: argparse.Namespace) -> None:
    """Requests before the timed ones: kernels are compiled and pools touched."""
    first = [item for item in items if not item.after][: max(args.max_running // 4, 1)]
    first = [traces.replace(item, delay=0.0, max_tokens=min(item.max_tokens, 8)) for item in first]
    Player(llm.engine, first).play()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help='directory with a config.json; weights are random. Or "embedded"')
    parser.add_argument("--trace", default="chat", choices=sorted(TRACES))
    parser.add_argument("--file", type=Path, help="replay a trace: JSON lines of our own, or Mooncake's")
    parser.add_argument("--block", type=int, default=traces.BLOCK, help="tokens to make of Mooncake's 512")
    parser.add_argument("--most", type=int, help="only the first requests")
    parser.add_argument("--load", type=float, default=0.6, help="share of the saturated rate without the cache")
    parser.add_argument("--units", type=int, default=16, help="conversations, agents, users or problems")
    parser.add_argument("--turns", type=int, default=8, help="of each, or levels of a tree")
    parser.add_argument("--prompt", type=int, default=1500, help="mean new tokens of a turn")
    parser.add_argument("--output", type=int, default=500, help="mean answer of a turn")
    parser.add_argument("--max-running", type=int, default=16, help="requests that decode together")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--cache-slots", type=int, help="states for cached prefixes")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--drafter", help="method of speculative decoding, e.g. ngram")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1, help="drafts of a level: 2 and more make trees")
    parser.add_argument("--draft-model", help="directory of the draft model, for --drafter draft")
    parser.add_argument("--state-dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--state-mode", default="auto", choices=["auto", "classic", "replay"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--alone", action="store_true", help="also run each turn's new tokens as a prompt of their own")
    parser.add_argument("--runs", type=lambda t: t.split(","), default=None, help=f"some of {','.join(RUNS)}")
    parser.add_argument("--rate", type=float, help="requests a second of the saturated run without the cache")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of a run after which nothing is sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="write benchmarks/results/NAME.json")
    parser.add_argument("--write", type=Path, help="write the trace to a file, and run nothing")
    args = parser.parse_args(arguments)
    args.runs = args.runs or [run for run in RUNS if args.alone or run != "alone"]
    if unknown := set(args.runs) - set(RUNS):
        parser.error(f"--runs has {sorted(unknown)}; choose from {', '.join(RUNS)}")
    return args


def main() -> None:
    args = parse()
    if args.write:
        traces.write(args.write, make_items(args, 2**14))
        return
    rows = measure(args)
    print(environment())
    if args.name:
        print(save(args.name, rows))


if __name__ == "__main__":
    main()
