"""Sends answers to clients that may read slowly or go away."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridrt.base.errors import HybridrtError
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.reply import Reply
from hybridrt.server.core.service import record
from hybridrt.server.wire.errors import as_api_error
from hybridrt.server.wire.http_limits import BODY_WRITER, BodyWriter
from hybridrt.server.wire.sse import pieces

# Microseconds (Reply.weight) up to which the event loop makes an answer itself: a thread costs a tenth of them.
INLINE = 1000
AT_ONCE = 100  # deltas before others have their turn
PART_BYTES = 2**18  # bytes of a large answer that are sent at a time
CLIENT_GONE = 499  # the status of nginx's logs; never sent
FAILURE = "hybridrt.failure"
COUNT_HEADER = b"x-hybridrt-count"  # of routers: says how many tokens a stream has given
ELSEWHERE = b": elsewhere\n\n"  # for these: the answer has not ended, and another replica can go on with it
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client has closed its connection. What ran for it has been aborted."""


async def respond(answer: Reply, request: Request) -> Response:
    """The answer, or its stream.

    Raises:
        EngineError: the request has failed.
        ClientGone: the client has closed its connection.
    """
    record(request.scope, model=answer.model, stream=answer.streams, prompt_tokens=answer.prompt_tokens)
    if answer.streams:
        counts = any(name == COUNT_HEADER for name, _ in request.scope["headers"])
        return _with_warnings(EventStream(answer, counts), answer)
    try:
        body = await while_connected(request.receive, whole_answer(answer))
    finally:
        answer.deltas.close()
    record(request.scope, **answer.facts())
    response = Response(body[0], media_type="application/json") if len(body) == 1 else LargeJSON(body)
    return _with_warnings(response, answer)


def _with_warnings(response: Response, answer: Reply) -> Response:
    for text in answer.warnings:
        response.headers.append("Warning", f'299 hybridrt "{text}"')
    return response


async def whole_answer(answer: Reply) -> list[bytes]:
    """The object of an answer in parts, at its end.

    Raises:
        EngineError: the request has failed.
    """
    if answer.resumes:
        await answer.in_thread(answer.catch_up)
    ended = [delta async for delta in answer.deltas]
    return await join_parts(answer.in_thread, pieces(partial(answer.whole, ended)), sum(map(answer.weight, ended)))


async def join_parts(in_thread: Callable[..., Awaitable[Any]], parts: Iterator[bytes], weight: int) -> list[bytes]:
    """Makes the parts of an answer, and joins them to a few large ones. An answer of more than INLINE
    microseconds (`weight`) is made in other threads, some parts at a time, so that neither the event
    loop nor other answers wait."""
    if weight <= INLINE:
        return [b"".join(parts)]
    found = list[bytes]()
    while (part := await in_thread(_some, parts)) is not None:
        found.append(part)
    return found


def _some(parts: Iterator[bytes]) -> bytes | None:
    """Returns about PART_BYTES; None at the end."""
    found, size = list[bytes](), 0
    for part in parts:
        found.append(part)
        size += len(part)
        if size >= PART_BYTES:
            break
    return b"".join(found) if found else None


class LargeJSON(Response):
    """A body in parts, each written when the client has taken the ones before."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send(_part(part))
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Server-sent events. With `counts` a comment after them says how many tokens of the answer have
    come, and the ids of the new ones if the answer is one sample. After the last token there is none:
    the end comes with its events, or not at all. ELSEWHERE comes before the error of a server that cannot go on.

    While the client does not read, deltas wait, joined, in their stream.
    While it does, each is written when it comes, without a switch to another task."""

    def __init__(self, answer: Reply, counts: bool = False) -> None:
        super().__init__(media_type="text/event-stream", headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self._answer, self._counts = answer, counts
        self._new = list[int]()  # tokens that no comment has told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FAILURE] = self._answer.failure
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._write(send, scope))
        finally:
            self._answer.deltas.close()
            record(scope, **self._answer.facts())

    async def _write(self, send: Send, scope: Scope) -> None:
        answer = self._answer
        if answer.resumes:
            await answer.in_thread(answer.catch_up)
        else:
            await self._open(send)
        if (writer := scope.get("extensions", {}).get(BODY_WRITER)) is not None:
            answer.deltas.write_now = partial(self._write_now, writer)
        try:
            async for delta in answer.deltas:
                gain = await join_parts(answer.in_thread, answer.gain(delta), answer.weight(delta))
                count = self._count(delta, any(gain))
                if any(gain):
                    await send(_part(b"".join(gain) + count))  # an error may follow whole events alone
                await asyncio.sleep(0)  # no call here waits
            closing = await join_parts(answer.in_thread, answer.closing(), answer.closing_weight())
            last = b"".join(closing)
        except HybridrtError as e:
            error = as_api_error(e)
            record(scope, status=error.status)
            last = (ELSEWHERE if self._counts and error.status == 503 else b"") + answer.failure(error, scope)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _open(self, send: Send) -> None:
        opening = self._answer.opening()
        while part := _some(opening):
            await send(_part(part))
            await asyncio.sleep(0)

    def _write_now(self, writer: BodyWriter, delta: Delta) -> bool:
        if writer.ready and self._answer.weight(delta) <= AT_ONCE:
            gain = b"".join(self._answer.gain(delta))
            count = self._count(delta, bool(gain))
            if gain:
                writer.write(gain + count)
            return True
        return False

    def _count(self, delta: Delta, told: bool) -> bytes:
        """The comment after the events of a delta; `told`: there are some."""
        if not self._counts:
            return b""
        if self._answer.samples == 1:
            self._new += delta.token_ids
        if not told or delta.finish_reason is not None:
            return b""
        new, self._new = self._new, []
        return b": tokens %d%b\n\n" % (self._answer.output_tokens, b"".join(b" %d" % token for token in new))


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of work. Raises ClientGone if the client has gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
