"""A client that reads many streams at little cost, so that it does not limit a benchmark.

Bytes are parsed after the load. Parsing 50 chunks that come together takes milliseconds: the last
one would be stamped late.
"""

import asyncio
import gc
import re
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hybridrt.base.errors import ConfigError
from hybridrt.bench.timing import Timing
from hybridrt.bench.workload import Work

_DONE = re.compile(rb"\ndata: ?\[DONE\]")  # JSON holds no line end
_DONE_BYTES = 16
MOST_BYTES, PART_BYTES = 2**28, 128  # of an answer in memory, and more for each part
SILENT_SECONDS = 1800.0  # without a byte of an answer
_STATUS_BYTES = 13
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Target:
    """A server.

    Args:
        url: such as http://127.0.0.1:8000; /v1/completions is added, or /v1/chat/completions for a
            request with images.
        model: its name there.
        api_key: sent as a bearer token.
        extra: fields added to each request.
    """

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] | None = None

    def request(self, work: Work) -> bytes:
        fields = {"model": self.model, "max_tokens": work.max_tokens, "seed": work.seed}
        fields |= {"messages": _messages(work)} if work.images else {"prompt": work.prompt}
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        endpoint = "chat/completions" if work.images else "completions"
        return self.post(endpoint, msgspec.json.encode(fields | options | (self.extra or {})))

    def post(self, endpoint: str, body: bytes) -> bytes:
        """The bytes of a request to /v1/`endpoint`."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/").removesuffix("/v1") + f"/v1/{endpoint}"
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """A connection of its own for one request.

        Raises:
            ConfigError: the URL names no server.
            OSError: no server listens there.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"{self.url} is no URL of a server; pass one such as http://127.0.0.1:8000")
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(protocol, parts.hostname, port, ssl=secure)
        return transport


def _messages(work: Work) -> list[dict[str, Any]]:
    """One message: the images, then a word for each token of the prompt."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": uri}} for uri in work.images]
    parts.append({"type": "text", "text": " ".join(map(str, work.prompt))})
    return [{"role": "user", "content": parts}]


class Received(asyncio.Protocol):
    """The bytes of one answer, and when they came.

    Args:
        now: the clock.

    Attributes:
        parts: time and bytes, in order.
        ended: done when the answer has ended, or broken off.
        failure: why the connection failed; None if it did not.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: Exception | None = None
        self._now = now
        self._size = 0
        self._last = b""  # a mark may lie in two parts
        self._status = b""  # such as HTTP/1.1 200 OK

    def data_received(self, data: bytes) -> None:
        self.parts.append((self._now(), data))
        self._size += len(data) + PART_BYTES
        if self._size > MOST_BYTES:
            self.give_up(f"the answer has more than {MOST_BYTES} bytes")
            return
        if len(self._status) < _STATUS_BYTES:
            self._status += data[:_STATUS_BYTES]
        data = self._last + data
        self._last = data[-_DONE_BYTES:]
        # A refusal is short, and its connection may stay open.
        if (b"[DONE]" in data and _DONE.search(data)) or (
            self._status[8:13] != b" 200 " and data.partition(_HEAD_END)[2]
        ):
            _finish(self.ended)

    def connection_lost(self, exc: Exception | None) -> None:
        self.failure = self.failure or exc
        _finish(self.ended)

    def give_up(self, why: str) -> None:
        self.failure = self.failure or ConnectionError(why)
        _finish(self.ended)

    async def wait(self) -> None:
        """Waits until the answer has ended, or nothing of it comes for SILENT_SECONDS."""
        seen = -1
        while not self.ended.done():
            if len(self.parts) == seen:
                self.give_up(f"nothing came for {SILENT_SECONDS:g} seconds")
            seen = len(self.parts)
            await asyncio.wait((self.ended,), timeout=SILENT_SECONDS)


Send = Callable[[Work, Callable[[], float]], Awaitable[Received]]


@dataclass
class LoadResult:
    """The result of a load.

    Attributes:
        timings: times of the requests that have ended.
        client_cpu_share: CPU time of the client as a share of the load's time. A client near 1 has
            measured itself.
        client_loop: the module of its event loop.
    """

    timings: list[Timing]
    client_cpu_share: float
    client_loop: str


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's if installed, else Python's, which needs three times as long for a chunk and stamps
    late ones later."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def run_load(target: Target, work: Sequence[Work], concurrency: int | None) -> LoadResult:
    """Sends each request at its arrival, at most `concurrency` at a time. When cancelled, it closes
    the connections and returns the requests that have ended.

    Raises:
        OSError: no server listens.
    """
    (await target.connect(asyncio.Protocol)).close()
    cpu, start = time.process_time(), time.perf_counter()
    gc.disable()  # a collection would delay all stamps
    try:
        answers = await at_arrivals(work, partial(send_request, target), concurrency)
    finally:
        gc.enable()
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    return LoadResult([_read(answer, timing) for timing, answer in answers], share, loop)


async def at_arrivals(work: Sequence[Work], send: Send, concurrency: int | None) -> list[tuple[Timing, Received]]:
    """Calls `send(work, now)` when a request is due. Cancelled, returns those that have ended."""
    start = time.perf_counter()
    places = asyncio.Semaphore(concurrency or len(work) or 1)
    ended: list[tuple[Timing, Received]] = []

    def now() -> float:
        return time.perf_counter() - start

    async def one(each: Work, due: asyncio.Future[None]) -> tuple[Timing, Received]:
        await due
        async with places:
            timing = Timing(each.arrival if concurrency is None else now(), len(each.prompt))
            answer = await send(each, now)
            timing.end = now()
            ended.append((timing, answer))
            return ended[-1]

    with _ringing([each.arrival for each in work], now) as due:
        try:
            return list(await asyncio.gather(*map(one, work, due)))
        except asyncio.CancelledError:
            return ended


@contextmanager
def _ringing(arrivals: Sequence[float], now: Callable[[], float]) -> Iterator[list[asyncio.Future[None]]]:
    """A thread rings: event loops are exact to a millisecond only."""
    loop, stopped = asyncio.get_running_loop(), threading.Event()
    due = [loop.create_future() for _ in arrivals]

    def ring() -> None:
        for arrival, future in sorted(zip(arrivals, due), key=lambda each: each[0]):
            if stopped.wait(max(arrival - now(), 0)):
                return
            loop.call_soon_threadsafe(_finish, future)

    thread = threading.Thread(target=ring, name="arrivals", daemon=True)
    thread.start()
    try:
        yield due
    finally:
        stopped.set()
        thread.join()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def send_request(target: Target, work: Work, now: Callable[[], float]) -> Received:
    answer = Received(now)
    try:
        transport = await target.connect(lambda: answer)
        try:
            transport.write(target.request(work))
            await answer.wait()
        finally:
            transport.close()
    except OSError as e:
        answer.failure = e
    return answer


def _read(answer: Received, timing: Timing) -> Timing:
    try:
        for now, event in events(answer.parts):
            _read_chunk(event, timing, now)
        if not timing.gains:
            raise ValueError("the answer has no tokens")
        if timing.output_tokens == 0:
            timing.output_tokens = sum(count for _, count in timing.gains)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, msgspec.MsgspecError) as e:
        failure = answer.failure or e
        timing.error = f"{type(failure).__name__}: {failure}"
    if timing.gains:
        timing.end = timing.gains[-1][0]
    return timing


def _read_chunk(event: bytes, timing: Timing, now: float) -> None:
    chunk = msgspec.json.decode(event)
    if "error" in chunk:
        raise ValueError(chunk["error"].get("message", "an error without a message"))
    if chunk.get("choices") and _has_gain(chunk["choices"][0]):
        tokens = chunk["choices"][0].get("token_ids")
        timing.gains.append((now, len(tokens) if tokens else 1))
    if chunk.get("usage"):
        timing.output_tokens = int(chunk["usage"]["completion_tokens"])


def _has_gain(choice: dict[str, Any]) -> bool:
    """False for the first chunk of a chat, which has the role and no token."""
    return "role" not in choice.get("delta", ()) or bool(choice["delta"].get("content"))


def events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yields events up to [DONE], and when each was whole. ValueError for any other answer."""
    head, body = _cut_head(parts)
    status, dechunk, held = head.split(b" ", 2)[1], _Dechunker() if b"chunked" in head.lower() else bytes, b""
    if status != b"200":
        raise ValueError(f"HTTP {status.decode()}: {b''.join(d for _, d in body)[:2000].decode(errors='replace')}")
    for now, data in body:
        *lines, held = (held + dechunk(data)).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data" and value.strip() == b"[DONE]":
                return
            if name == b"data":
                yield now, value
    raise ValueError("the answer broke off before [DONE]")


def _cut_head(parts: Sequence[tuple[float, bytes]]) -> tuple[bytes, list[tuple[float, bytes]]]:
    head = b""
    for i, (now, data) in enumerate(parts):
        head, end, body = (head + data).partition(_HEAD_END)
        if end:
            return head, [(now, body), *parts[i + 1 :]]
    raise ValueError("the server closed the connection without an answer")


class _Dechunker:
    """Removes HTTP's chunk sizes."""

    def __init__(self) -> None:
        self._held = b""
        self._left = 0  # bytes of the chunk and its line end

    def __call__(self, data: bytes) -> bytes:
        data, out = self._held + data, b""
        self._held = b""
        while data:
            if self._left:
                out += data[: max(self._left - 2, 0)]
                taken = min(self._left, len(data))
                self._left, data = self._left - taken, data[taken:]
                continue
            size, line_end, rest = data.partition(b"\r\n")
            if not line_end:
                self._held = data
                break
            self._left, data = int(size.split(b";")[0], 16) + 2, rest
        return out
