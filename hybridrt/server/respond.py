"""Answers on their way to a client that may read slowly, or go away."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridrt.engine.async_llm import DeltaStream
from hybridrt.engine.outputs import Delta
from hybridrt.errors import HybridrtError
from hybridrt.server.errors import as_api_error
from hybridrt.server.http_limits import BODY_WRITER, BodyWriter
from hybridrt.server.reply import Reply
from hybridrt.server.service import record
from hybridrt.server.sse import encode

CLIENT_GONE = 499  # as in nginx's logs; it is never sent
FAILURE = "hybridrt.failure"  # where a stream's scope keeps what makes its end of an error: Reply.failure
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client has closed its connection. What ran for it has been aborted."""


async def respond(answer: Reply, request: Request) -> Response:
    """The answer, or the stream of it.

    Raises:
        EngineError: the request has failed.
        ClientGone: the client has closed its connection.
    """
    record(request.scope, model=answer.model, stream=answer.streams, prompt_tokens=answer.prompt_tokens)
    if answer.streams:
        return EventStream(answer)
    try:
        ended = await _while_connected(request.receive, _collect(answer.deltas))
    finally:
        answer.deltas.close()
    body = encode(answer.whole(ended))
    record(request.scope, **answer.facts())
    return Response(body, media_type="application/json")


async def _collect(deltas: DeltaStream) -> list[Any]:
    return [delta async for delta in deltas]


class EventStream(Response):
    """Server-sent events. While the client does not take what was sent, nothing is made of the deltas; they wait,
    joined, in their stream. While it does, each delta is written when it comes, without a switch to another task."""

    def __init__(self, answer: Reply) -> None:
        super().__init__(media_type="text/event-stream", headers=_EVENT_HEADERS)
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[FAILURE] = self._answer.failure
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _while_connected(receive, self._write(send, scope))
        finally:
            self._answer.deltas.close()
            record(scope, **self._answer.facts())

    async def _write(self, send: Send, scope: Scope) -> None:
        answer = self._answer
        if opening := answer.opening():
            await send(_part(opening))
        if (writer := scope.get("extensions", {}).get(BODY_WRITER)) is not None:
            answer.deltas.take = partial(self._write_now, writer)
        try:
            async for delta in answer.deltas:
                if gain := answer.gain(delta):
                    await send(_part(gain))
            last = answer.closing()
        except HybridrtError as e:
            error = as_api_error(e)
            record(scope, status=error.status)
            last = answer.failure(error, scope["path"])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _write_now(self, writer: BodyWriter, delta: Delta) -> bool:
        if writer.ready:
            writer.write(self._answer.gain(delta))
            return True
        return False


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Does work until it is done, or the client goes away.

    Raises:
        ClientGone: it has.
    """
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
