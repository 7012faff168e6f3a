"""Publishes the events of the prefix cache to routers, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridrt.fleet.cache_messages import cache_messages, layout_message
from hybridrt.fleet.prefix_mirror import CacheLayout
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, CacheSubscription
from hybridrt.server.core.respond import FAILURE, while_connected
from hybridrt.server.core.service import Service
from hybridrt.server.wire.errors import APIError, stream_end

MAX_READERS = 16
HELD = 4096  # events that wait for a slow reader; then it gets all contents anew
READ_SECONDS = 0.05
BEAT_SECONDS = 1.0  # without events, a line comes so often
SLOW_SECONDS = 10.0  # a reader that takes no bytes for so long loses its connection
PART = 64  # events that are encoded at a time
_RESET = b'data: {"type":"AllBlocksCleared","medium":"GPU","why":"resend"}\n\n' \
    b'data: {"type":"AllBlocksCleared","medium":"CPU","why":"resend"}\n\n'  # fmt: skip


class CacheStream(Response):
    """First the layout, then the present contents, then each change. `id` counts the messages. A
    reader that was too slow is told to forget everything, and gets the present contents again."""

    def __init__(self, service: Service) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        if service.cache_readers >= MAX_READERS:
            raise APIError(429, f"{MAX_READERS} readers have the events of the prefix cache; close one of them")
        layout = service.llm.llm.engine.cache_layout()
        if layout is None:
            raise APIError(404, "this server keeps no prefixes")
        self._service, self._layout = service, replace(layout, model=service.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FAILURE] = stream_end
        self._service.cache_readers += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._write(send))
        except TimeoutError:
            pass  # the reader takes nothing: its connection ends
        finally:
            self._service.cache_readers -= 1

    async def _write(self, send: Send) -> None:
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                async with asyncio.timeout(SLOW_SECONDS):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncGenerator[bytes]:
        llm, layout, number, quiet = self._service.llm, self._layout, 0, 0.0
        yield b"event: layout\ndata: %b\n\n" % layout_message(layout)
        events = await self._subscribe()
        try:
            while not llm.draining:
                found, missed = events.read(), events.missed
                if missed:
                    events.close()
                    events = await self._subscribe()
                    yield _RESET
                    continue
                for start in range(0, len(found), PART):
                    parts = await llm.in_thread(_encoded, found[start : start + PART], layout, number)
                    number += len(parts)
                    yield b"".join(parts)
                quiet = 0.0 if found else quiet + READ_SECONDS
                if quiet >= BEAT_SECONDS:
                    yield b": beat\n\n"
                    quiet = 0.0
                await asyncio.sleep(READ_SECONDS)
        finally:
            events.close()

    async def _subscribe(self) -> CacheSubscription:
        """In a thread: the contents of a large cache are many."""
        found: CacheSubscription = await self._service.llm.in_thread(_subscription, self._service)
        return found


def _subscription(service: Service) -> CacheSubscription:
    return service.llm.llm.cache_events(limit=HELD)


def _encoded(events: list[CacheEvent], layout: CacheLayout, number: int) -> list[bytes]:
    messages = (message for event in events for message in cache_messages(event, layout))
    return [b"id: %d\ndata: %b\n\n" % (number + i, message) for i, message in enumerate(messages)]
