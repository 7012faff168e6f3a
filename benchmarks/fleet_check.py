"""Replicas of a router while they are killed, stopped, started and ended: no request is lost, no token is wrong.

    python -m benchmarks.fleet_check --requests 1000 --faults kill
    python -m benchmarks.fleet_check --replica double --requests 20000 --faults kill
    python -m benchmarks.fleet_check --requests 1000 --faults stop
    python -m benchmarks.fleet_check --requests 1000 --faults scale
    python -m benchmarks.fleet_check --replica prefill --requests 1000 --faults kill
    python -m benchmarks.fleet_check --replica ray --requests 1000 --faults kill

Replicas are processes with the built-in model, or with the double of a device (`double`), or half of them compute the
prompts of the others (`prefill`, extra `transfer`), or Ray Serve starts them (`ray`, extra `ray`). Requests are those
of chats and agents, streamed. Every token is compared with the offline one. A stream that is cut in its middle is
resumed as its error says, by this client, or with `--resume` by the router. The command fails if anything is lost or
wrong, or if a stopped replica is left late.
"""

import argparse
import asyncio
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import torch

from benchmarks.common import environment, save
from benchmarks.fleet_processes import LONGEST, ROWS, Fleet, fleet
from benchmarks.traces import TRACES, Item, Shape
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.sampling_params import SamplingParams

LEFT_SECONDS = 5.0  # within which a stopped replica must be left
TURNS = 4
SEED = 7
VOCAB = {"double": 250}
Answers = Mapping[str, Sequence[int]]


@dataclass
class Report:
    """What happened.

    Attributes:
        wrong: requests with other tokens than offline, and the first place.
        lost: requests that got no whole answer.
        cut: streams that ended in their middle.
        left_seconds: how long a stopped replica got requests.
        most: replicas that were ready together while their number changed.
        ended: that were told to end while requests ran.
        scaled: under Ray Serve, all were ready, and one was left at the end.
    """

    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    cut: int = 0
    kills: int = 0
    stops: int = 0
    left_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    most: int = 0
    ended: int = 0
    scaled: bool = True

    @property
    def good(self) -> bool:
        return (
            self.scaled and not self.lost and not self.wrong and all(took <= LEFT_SECONDS for took in self.left_seconds)
        )


def trace(kind: str, requests: int) -> list[Item]:
    """Chats and agents, half each."""
    units, found = -(-requests // (2 * TURNS)), list[Item]()
    for name in ("chat", "agents"):
        items = TRACES[name](Shape(units, TURNS, 20, 16, VOCAB.get(kind, 4000), seed=len(name)))
        found += [_renamed(item, name) for item in items]
    return sorted(found, key=lambda item: len(item.parts))[:requests]  # each after those that it quotes


def _renamed(item: Item, name: str) -> Item:
    parts = tuple(p if isinstance(p, tuple) else type(p)(f"{name} {p.of}", p.start, p.end) for p in item.parts)
    return Item(f"{name} {item.id}", parts, item.max_tokens, tuple(f"{name} {other}" for other in item.after))


def expected_embedded(items: Sequence[Item]) -> dict[str, list[int]]:
    """Answers of one engine, wave by wave."""
    answers, waiting = dict[str, list[int]](), list(items)
    options: dict[str, Any] = {"device": "cpu", "max_running_requests": 4 * ROWS, "max_model_len": LONGEST}
    with LLM(str(resolve_model_path("embedded")), **options) as llm:
        while waiting:
            wave = [item for item in waiting if all(other in answers for other in item.after)]
            params = [SamplingParams(max_tokens=item.max_tokens, temperature=0, ignore_eos=True) for item in wave]
            outputs = llm.generate([item.prompt(answers) for item in wave], params)
            answers |= {item.id: list(output.token_ids) for item, output in zip(wave, outputs, strict=True)}
            waiting = [item for item in waiting if item.id not in answers]
    return answers


def expected_double(items: Sequence[Item]) -> dict[str, list[int]]:
    from tests.support.mock_executor import tokens_alone
    from tests.support.scripted_llm import byte_tokenizer

    vocab, answers = len(byte_tokenizer().hf), dict[str, list[int]]()
    for item in items:
        answers[item.id] = tokens_alone(item.prompt(answers), SEED, item.max_tokens, vocab)
    return answers


class Client:
    """Plays a trace, some requests at a time."""

    def __init__(self, url: str, items: Sequence[Item], together: int, report: Report) -> None:
        self._items, self._report, self._room = items, report, asyncio.Semaphore(together)
        self._client = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self._ended: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.answers: dict[str, list[int]] = {}

    async def play(self) -> None:
        async with self._client:
            await asyncio.gather(*(self._one(item) for item in self._items))

    async def _one(self, item: Item) -> None:
        for other in item.after:
            await self._ended[other].wait()
        try:
            if all(other in self.answers for other in item.after):
                async with self._room:
                    self._report.requests += 1
                    self.answers[item.id] = await self._answer(item, item.prompt(self.answers))
        except (httpx.HTTPError, LostError) as e:
            self._report.lost.append(f"{item.id}: {e!r}"[:300])
        finally:
            self._ended[item.id].set()

    async def _answer(self, item: Item, prompt: list[int]) -> list[int]:
        got, error = await self._stream(item, prompt, [])
        while error is not None:
            if error.get("code") != "stream_cut" or error["resume_from"] != len(got):
                raise LostError(json.dumps(error))
            self._report.cut += 1
            more, error = await self._stream(item, prompt, got)
            got += more
        return got

    async def _stream(self, item: Item, prompt: list[int], resumed: list[int]) -> tuple[list[int], Any]:
        """New tokens, and the error at the end of the stream."""
        body = {
            "prompt": prompt, "max_tokens": item.max_tokens, "temperature": 0, "ignore_eos": True, "seed": SEED,
            "stream": True, "return_token_ids": True, "resume_token_ids": resumed,
        }  # fmt: skip
        got, error = list[int](), None
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise LostError(f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    error = event.get("error", error)
                    for choice in event.get("choices", ()):
                        got += choice.get("token_ids") or []
        return got, error


class LostError(Exception):
    """A request has no whole answer."""


async def kill(found: Fleet, report: Report, every: float) -> None:
    """SIGKILL of one process after the other; it starts again at once. The fleet is whole before each, however slow
    the machine is: a request that loses two replicas is answered with an error."""
    draw = random.Random(1)
    while True:
        await asyncio.sleep(every)
        await asyncio.to_thread(found.wait_until_whole)
        process = draw.choice(await asyncio.to_thread(found.workers))
        process.end()
        report.kills += 1
        process.start()


async def stop(found: Fleet, report: Report, every: float) -> None:
    """SIGSTOP of one process after the other, until all others have left it and a while longer."""
    draw = random.Random(2)
    while True:
        await asyncio.sleep(every)
        await asyncio.to_thread(found.wait_until_whole)
        process = draw.choice(await asyncio.to_thread(found.workers))
        process.send(signal.SIGSTOP)
        report.stops += 1
        began = time.monotonic()
        while not await asyncio.to_thread(found.is_left, process) and time.monotonic() - began < 60:
            await asyncio.sleep(0.05)
        report.left_seconds.append(round(time.monotonic() - began, 2))
        await asyncio.sleep(6)
        process.send(signal.SIGCONT)


async def scale(found: Fleet, report: Report, every: float) -> None:
    """From one replica to all, and back with SIGTERM."""
    more = found.workers()[1:]
    for process in more:
        await asyncio.sleep(every)
        process.start()
    await asyncio.to_thread(found.wait_for, 1 + len(more))
    report.most = 1 + len(more)
    for process in reversed(more):
        await asyncio.sleep(every)
        process.send(signal.SIGTERM)
        report.ended += 1


async def watch(found: Fleet, report: Report, every: float) -> None:
    """Ray scales by itself."""
    while True:
        await asyncio.sleep(0.5)
        report.most = max(report.most, sum((await asyncio.to_thread(found.states)).values()))


FAULTS: dict[str, Callable[[Fleet, Report, float], Awaitable[None]]] = {"kill": kill, "stop": stop, "scale": scale}


async def play(found: Fleet, items: Sequence[Item], args: argparse.Namespace, report: Report) -> Answers:
    client, began = Client(found.router.url, items, args.together, report), time.monotonic()
    scales = args.replica == "ray" and args.faults == "scale"
    fault = watch if scales else FAULTS.get(args.faults)
    trouble = None if fault is None else asyncio.ensure_future(fault(found, report, args.every))
    await client.play()
    if trouble is not None:
        if trouble.done():
            trouble.result()
        trouble.cancel()
    report.seconds = round(time.monotonic() - began, 1)
    if scales:
        await asyncio.to_thread(found.wait_for, 1)
        report.scaled = report.most == args.replicas
    return client.answers


def check(args: argparse.Namespace) -> Report:
    items, report = trace(args.replica, args.requests), Report()
    expected = (expected_double if args.replica == "double" else expected_embedded)(items)
    started = 1 if args.faults == "scale" else args.replicas
    with fleet(args.replica, args.replicas, started, args.resume) as found:
        answers = asyncio.run(play(found, items, args, report))
    report.wrong = [
        f"{name}: {tokens} after {first_difference(tokens, expected[name])} tokens is not {expected[name]}"
        for name, tokens in answers.items()
        if tokens != expected[name]
    ]
    return report


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(got, expected, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(got), len(expected)))


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", choices=("embedded", "double", "prefill", "ray"), default="embedded")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--together", type=int, default=16, help="requests at a time")
    parser.add_argument("--faults", choices=("none", *FAULTS), default="none")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults, at least")
    parser.add_argument("--resume", action="store_true", help="the router resumes streams")
    parser.add_argument("--save", help="file for the result")
    args = parser.parse_args(given)
    if (args.replica, args.faults) == ("prefill", "scale"):
        parser.error("--faults scale is for replicas that compute their own prompts")
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # as replicas have: offline threads would wait for cores of others
    report = check(args)
    result = {**vars(args), **asdict(report), "good": report.good, "environment": environment()}
    print(json.dumps(result, indent=1, default=str))
    if args.save:
        save(args.save, result)
    if not report.good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
