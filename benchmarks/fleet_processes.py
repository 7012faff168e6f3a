"""Replicas, workers and a router as processes of this machine, for benchmarks.fleet_check."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import psutil

from hybridrt.channel.keys import FLEET_VARIABLE
from hybridrt.transfer import keys

START_SECONDS = 300.0  # that a process may take until it is ready
END_SECONDS = 60.0
ROWS, LONGEST = 8, 512
QUIET = ["--log-level", "warning", "--no-access-log"]
EMBEDDED = ["-m", "hybridrt", "serve", "embedded", "--device", "cpu", "--max-running-requests", str(ROWS),
            "--max-model-len", str(LONGEST), *QUIET]  # fmt: skip
# Room for two or three states: those that a stopped worker holds are missing for others.
ARENA = ["--transfer-bytes", str(2**22)]
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


class Ray(Process):
    """Ray with a router and replicas. It gets time to end its processes."""

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                super().end()


class Worker(Protocol):
    """A process that faults may meet."""

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def send(self, number: int) -> None: ...
    def end(self) -> None: ...


@dataclass
class Actor:
    """The process of a replica that Ray starts, and starts again."""

    url: str
    process: psutil.Process

    def start(self) -> None:
        pass

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()


@dataclass
class Fleet:
    """A router in front of replicas.

    Attributes:
        started_here: replicas, and workers that compute their prompts; none of Ray's.
        prompts: how many of them are such workers. They come first.
        count: replicas that the router has when all run.
    """

    router: Process
    started_here: list[Process]
    prompts: int
    count: int
    key: str

    def workers(self) -> Sequence[Worker]:
        """All processes that faults may meet."""
        return self.started_here or actors(self.states())

    def replicas(self) -> Sequence[Worker]:
        """Those that the router knows."""
        return self.workers()[self.prompts :]

    def states(self) -> dict[str, bool]:
        """Which replicas get requests, by URL."""
        headers = {"Authorization": f"Bearer {self.key}"}
        facts: list[dict[str, Any]] = httpx.get(f"{self.router.url}/fleet/replicas", headers=headers, timeout=30).json()
        return {fact["url"]: fact["ready"] for fact in facts}

    def is_left(self, process: Worker) -> bool:
        """Whether it gets no more requests: of the router or, if it computes prompts, of any replica."""
        if process in self.started_here[: self.prompts]:
            return all(metric(replica.url, "hybridrt:prefill_workers") < self.prompts for replica in self.replicas())
        return not self.states().get(process.url)

    def wait_for(self, count: int) -> None:
        """Until so many replicas get requests."""
        _wait(lambda: sum(self.states().values()) == count, f"there are not {count} replicas that are ready")

    def wait_until_whole(self) -> None:
        """Until all replicas get requests, and all workers that compute prompts get these."""
        self.wait_for(self.count)
        for replica in self.replicas() if self.prompts else ():
            url = replica.url
            text = f"{url} does not have {self.prompts} servers for prompts"
            _wait(lambda url=url: metric(url, "hybridrt:prefill_workers") == self.prompts, text)


def _wait(holds: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(problem)
        time.sleep(0.2)


def metric(url: str, name: str) -> float:
    """A number of a server's /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def actors(urls: Iterable[str]) -> list[Actor]:
    """The processes that listen on the ports of these addresses."""
    listening = {link.laddr.port: link.pid for link in psutil.net_connections("tcp") if link.status == "LISTEN"}
    ports = {url: int(url.rpartition(":")[2]) for url in urls}
    return [Actor(url, psutil.Process(listening[port])) for url, port in ports.items() if port in listening]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def servers(kind: str, count: int, environment: dict[str, str]) -> tuple[list[Process], list[Process]]:
    """Workers that compute prompts for the others, and replicas; neither runs yet."""
    if kind != "prefill":
        return [], [Process(DOUBLE if kind == "double" else EMBEDDED, environment) for _ in range(count)]
    prompts = [Process([*EMBEDDED, *ARENA, "--role", "prefill"], environment) for _ in range(count // 2)]
    urls = [part for worker in prompts for part in ("--prefill-url", worker.url)]
    decode = [*EMBEDDED, *ARENA, "--role", "decode", *urls]
    return prompts, [Process(decode, environment) for _ in range(count - len(prompts))]


@contextmanager
def fleet(kind: str, count: int, started: int, resume: bool) -> Iterator[Fleet]:
    """`count` replicas of a kind, of which `started` run: "embedded", "double", "ray" (the built-in model under Ray
    Serve, which starts the others as it needs them), or "prefill": half of the processes compute the prompts of the
    others."""
    environment = {FLEET_VARIABLE: secrets.token_hex(32), keys.VARIABLE: secrets.token_hex(32)}
    prompts, replicas = ([], []) if kind == "ray" else servers(kind, count, environment)
    workers, options = [*prompts, *replicas], ["--resume"] if resume else []
    if kind == "ray":
        options += ["--replicas", str(count), *(["--scale"] if started < count else [])]
        router: Process = Ray(["-m", "benchmarks.fleet_ray", *options], environment)
    else:
        options += [part for replica in replicas for part in ("--replica", replica.url)]
        router = Process(["-m", "hybridrt", "router", *QUIET, *options], environment)
    found = Fleet(router, workers, len(prompts), count - len(prompts), environment[FLEET_VARIABLE])
    try:
        for process in workers[:started]:
            process.start()
        for process in workers[:started]:
            process.wait_until_ready()
        router.start()
        router.wait_until_ready()
        found.wait_for(started - len(prompts))
        yield found
    finally:
        for process in [router, *workers]:
            if process.runs:
                process.send(signal.SIGCONT)
            process.end()
