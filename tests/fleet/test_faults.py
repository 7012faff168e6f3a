"""Replicas as processes, and a router: killed, stopped and drained while requests run."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.channel.keys import FLEET_VARIABLE
from hybridrt.engine.api.llm import LLM
from tests.support.http_server import WAIT
from tests.support.one_layer import write_first_layer
from tests.support.routing import FLEET_KEY, Routed, routing

pytestmark = pytest.mark.slow
PROMPT = [11, 12, 13, 14]
OUTPUT = 24


@dataclass
class Process:
    """A replica."""

    port: int
    model: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "hybridrt", "serve", str(self.model), "--port", str(self.port)]
        command += ["--device", "cpu", "--max-running-requests", "8", "--max-model-len", "256"]
        command += ["--log-level", "warning", "--no-access-log"]
        environment = os.environ | {FLEET_VARIABLE: FLEET_KEY, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def processes(count: int, model: Path) -> Iterator[list[Process]]:
    found = []
    for _ in range(count):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            found.append(Process(taken.getsockname()[1], model))
    try:
        for each in found:
            each.start()
        yield found
    finally:
        for each in found:
            each.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_first_layer(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", max_running_requests=8, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def replicas(model: Path) -> Iterator[list[Process]]:
    with processes(2, model) as made:
        yield made


@pytest.fixture
def routed(replicas: list[Process], model: Path) -> Iterator[Routed]:
    for each in replicas:
        if each.process is None or each.process.poll() is not None:
            each.start()
    with routing(*(each.url for each in replicas), tokenizer=str(model)) as router:
        router.wait_for(len(replicas))
        router.wait_for_caches()
        yield router


def prompts(count: int, seed: int) -> list[list[int]]:
    """Turns of chats: each continues an earlier prompt, or begins anew."""
    draw, found = random.Random(seed), list[list[int]]()
    for _ in range(count):
        before = draw.choice(found) if found and draw.random() < 0.7 else PROMPT
        found.append([*before[:120], *(draw.randrange(5, 200) for _ in range(draw.randint(8, 30)))])
    return found


def expected(offline: LLM, asked: list[list[int]]) -> list[list[int]]:
    outputs = offline.generate(asked, SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]


@dataclass
class Got:
    """Tokens of an answer, and the error at its end, if there is one."""

    tokens: list[int]
    error: dict[str, Any] | None = None


async def ask(client: httpx.AsyncClient, prompt: list[int], resumed: list[int] | None = None) -> Got:
    body = {
        "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "resume_token_ids": resumed or [],
    }  # fmt: skip
    got = Got(list(resumed or []))
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                got.error = event.get("error", got.error)
                for choice in event.get("choices", ()):
                    got.tokens += choice.get("token_ids") or []
    return got


async def ask_all(url: str, asked: list[list[int]], together: int, trouble: Any = None) -> list[Got]:
    """All answers, some at a time; `trouble` happens meanwhile. A cut answer is resumed."""
    room, cut = asyncio.Semaphore(together), 0

    async def one(prompt: list[int]) -> Got:
        nonlocal cut
        async with room:
            got = await ask(client, prompt)
            while got.error is not None:
                cut += 1
                assert got.error["code"] == "stream_cut" and got.error["resume_from"] == len(got.tokens), got
                before = got.tokens
                got = await ask(client, prompt, before)
            return got

    async with httpx.AsyncClient(base_url=url, timeout=WAIT) as client:
        work = asyncio.gather(*(one(prompt) for prompt in asked))
        if trouble is not None:
            await trouble()
        return await work


def test_answers_are_the_offline_ones_and_caches_are_used(routed: Routed, offline: LLM) -> None:
    asked = prompts(16, 1)
    got = asyncio.run(ask_all(routed.url, asked, 6))
    assert [each.tokens for each in got] == expected(offline, asked)
    metrics = routed.router.metrics
    assert metrics.prefix_tokens._value.get() > 0.1 * metrics.prompt_tokens._value.get()
    assert all(metrics.requests.labels(replica.url)._value.get() > 3 for replica in routed.router.replicas)


def test_nothing_is_lost_when_a_replica_is_killed(routed: Routed, replicas: list[Process], offline: LLM) -> None:
    asked, known = prompts(16, 2), routed.router.replicas[1]

    async def trouble() -> None:
        await until(lambda: any(exchange.begun for exchange in known.exchanges))
        replicas[1].signal(signal.SIGKILL)

    got = asyncio.run(ask_all(routed.url, asked, 6, trouble))
    assert [each.tokens for each in got] == expected(offline, asked)
    assert routed.router.metrics.retries._value.get() + routed.router.metrics.cut._value.get() > 0
    asyncio.run(until(lambda: not known.ready))  # by its next question


def test_a_stopped_replica_is_left_and_comes_back(routed: Routed, replicas: list[Process], offline: LLM) -> None:
    asked = prompts(12, 3)
    stopped = routed.router.replicas[0]

    async def trouble() -> None:
        replicas[0].signal(signal.SIGSTOP)
        began = time.monotonic()
        await until(lambda: not stopped.ready)
        print(f"left after {time.monotonic() - began:.1f} s")
        await asyncio.sleep(0.5)
        assert not any(not exchange.begun for exchange in stopped.exchanges)

    try:
        got = asyncio.run(ask_all(routed.url, asked, 4, trouble))
    finally:
        replicas[0].signal(signal.SIGCONT)
    assert [each.tokens for each in got] == expected(offline, asked)
    routed.wait_for(2)


def test_a_replica_that_shuts_down_ends_what_runs(routed: Routed, replicas: list[Process], offline: LLM) -> None:
    asked = prompts(16, 4)

    async def trouble() -> None:
        await until(lambda: any(exchange.begun for exchange in routed.router.replicas[1].exchanges))
        replicas[1].signal(signal.SIGTERM)
        assert replicas[1].process is not None
        assert await asyncio.to_thread(replicas[1].process.wait) == 0

    got = asyncio.run(ask_all(routed.url, asked, 4, trouble))
    assert [each.tokens for each in got] == expected(offline, asked)


async def until(holds: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
