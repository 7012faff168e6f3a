"""Replicas, workers and a router as processes of this machine, for benchmarks.fleet_check."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from hybridrt.channel.keys import FLEET_VARIABLE
from hybridrt.transfer import keys

START_SECONDS = 300.0  # that a process may take until it is ready
ROWS, LONGEST = 8, 512
EMBEDDED = ["-m", "hybridrt", "serve", "embedded", "--device", "cpu", "--max-running-requests", str(ROWS),
            "--max-model-len", str(LONGEST), "--log-level", "warning", "--no-access-log"]  # fmt: skip
DOUBLE = ["-m", "benchmarks.fleet_double"]


@dataclass
class Process:
    """A server on a port of its own. `options`: of its command, in addition to the port."""

    options: Sequence[str]
    environment: dict[str, str]
    port: int = field(default_factory=lambda: free_port())
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        command = [sys.executable, *self.options, "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(f"{self.url}/ready", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline or not self.runs:
                raise SystemExit(f"{' '.join(self.options)} does not start")
            time.sleep(0.2)


@dataclass
class Fleet:
    """A router in front of replicas. `workers`: all processes that faults may meet."""

    router: Process
    replicas: list[Process]
    workers: list[Process]
    key: str

    def states(self) -> dict[str, bool]:
        """Which replicas get requests, by URL."""
        headers = {"Authorization": f"Bearer {self.key}"}
        facts: list[dict[str, Any]] = httpx.get(f"{self.router.url}/fleet/replicas", headers=headers, timeout=30).json()
        return {fact["url"]: fact["ready"] for fact in facts}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def fleet(kind: str, count: int, started: int, resume: bool) -> Iterator[Fleet]:
    """`count` replicas of a kind, of which `started` run: "embedded", "double", or "prefill": half of the processes
    compute the prompts of the others."""
    key = secrets.token_hex(32)
    environment = {FLEET_VARIABLE: key, keys.VARIABLE: secrets.token_hex(32)}
    if kind == "prefill":
        prompts = [Process([*EMBEDDED, "--role", "prefill"], environment) for _ in range(count // 2)]
        urls = [part for worker in prompts for part in ("--prefill-url", worker.url)]
        replicas = [Process([*EMBEDDED, "--role", "decode", *urls], environment) for _ in range(count - len(prompts))]
        workers = [*prompts, *replicas]
    else:
        workers = replicas = [Process(DOUBLE if kind == "double" else EMBEDDED, environment) for _ in range(count)]
    options = ["-m", "hybridrt", "router", *(part for replica in replicas for part in ("--replica", replica.url))]
    options += ["--log-level", "warning", "--no-access-log", *(["--resume"] if resume else [])]
    router = Process(options, environment)
    try:
        for process in workers[:started]:
            process.start()
        for process in workers[:started]:
            process.wait_until_ready()
        router.start()
        router.wait_until_ready()
        yield Fleet(router, replicas, workers, key)
    finally:
        for process in [router, *workers]:
            if process.runs:
                process.send(signal.SIGCONT)
            process.end()
