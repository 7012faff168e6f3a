"""A client that reads many streams at once, and little else: the load must not be what limits a benchmark."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hybridrt.bench.timing import Timing
from hybridrt.bench.workload import Work
from hybridrt.errors import ConfigError

_READ_BYTES = 65536


@dataclass(frozen=True)
class Target:
    """A server.

    Args:
        url: such as http://127.0.0.1:8000; /v1/completions is added.
        model: its name there.
        api_key: sent as a bearer token.
        extra: fields added to each request.
    """

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] | None = None

    def request(self, work: Work) -> bytes:
        """A POST of one work."""
        parts = urlsplit(self.url)
        fields = {"model": self.model, "prompt": work.prompt, "max_tokens": work.max_tokens, "seed": work.seed}
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = msgspec.json.encode(fields | options | (self.extra or {}))
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
        return await asyncio.open_connection(parts.hostname, port, ssl=secure)


async def run_load(target: Target, work: Sequence[Work], concurrency: int | None) -> list[Timing]:
    """Sends all requests, each at its arrival; with `concurrency`, at most so many at a time, each as soon as it may.
    If it is cancelled, it closes the connections and returns the requests that have ended.

    Raises:
        OSError: no server listens.
    """
    _, writer = await target.connect()
    writer.close()
    return await at_arrivals(work, lambda each, timing, now: _request(target, each, timing, now), concurrency)


async def at_arrivals(
    work: Sequence[Work],
    send: Callable[[Work, Timing, Callable[[], float]], Awaitable[None]],
    concurrency: int | None,
) -> list[Timing]:
    """Calls `send(work, timing, now)` for each request when it is due. If cancelled, it returns what has ended."""
    start = time.perf_counter()
    places = asyncio.Semaphore(concurrency or len(work) or 1)
    ended: list[Timing] = []

    def now() -> float:
        return time.perf_counter() - start

    async def one(each: Work) -> Timing:
        await asyncio.sleep(each.arrival - now())
        async with places:
            timing = Timing(each.arrival if concurrency is None else now(), len(each.prompt))
            await send(each, timing, now)
            ended.append(timing)
            return timing

    try:
        return list(await asyncio.gather(*(one(each) for each in work)))
    except asyncio.CancelledError:
        return ended


async def _request(target: Target, work: Work, timing: Timing, now: Callable[[], float]) -> None:
    try:
        reader, writer = await target.connect()
        try:
            writer.write(target.request(work))
            async for event in _events(reader):
                _take(event, timing, now())
        finally:
            writer.close()
        if not timing.gains:
            raise ValueError("the answer has no tokens")
        if timing.output_tokens == 0:
            timing.output_tokens = sum(count for _, count in timing.gains)
    except (OSError, ValueError, asyncio.IncompleteReadError) as e:
        timing.error = f"{type(e).__name__}: {e}"
    timing.end = timing.gains[-1][0] if timing.gains else now()


def _take(event: bytes, timing: Timing, now: float) -> None:
    chunk = msgspec.json.decode(event)
    if "error" in chunk:
        raise ValueError(chunk["error"].get("message", "an error without a message"))
    if chunk.get("choices"):
        tokens = chunk["choices"][0].get("token_ids")
        timing.gains.append((now, len(tokens) if tokens else 1))
    if chunk.get("usage"):
        timing.output_tokens = chunk["usage"]["completion_tokens"]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events up to [DONE].

    Raises:
        ValueError: the answer is no stream of them, or an error, or breaks off.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    status, chunked = head.split(b" ", 2)[1], b"chunked" in head.lower()
    if status != b"200":
        raise ValueError(f"HTTP {status.decode()}: {(await reader.read(2000)).decode(errors='replace')}")
    dechunk, held = _Dechunker(), b""
    while data := await reader.read(_READ_BYTES):
        *lines, held = (held + (dechunk(data) if chunked else data)).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data" and value.strip() == b"[DONE]":
                return
            if name == b"data":
                yield value
    raise ValueError("the answer broke off before [DONE]")


class _Dechunker:
    """Takes HTTP's chunk sizes out of a body that comes in pieces."""

    def __init__(self) -> None:
        self._held = b""
        self._left = 0  # bytes of the chunk and of the line end behind it

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
