"""Sends a request to a replica and its answer back; to another replica if nothing has come back yet."""

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import quote

import httpx
from starlette.responses import Response
from starlette.types import Scope, Send

from hybridrt.fleet.replica_client import Exchange, ReplicaClient
from hybridrt.server.core.respond import COUNT_HEADER, FAILURE
from hybridrt.server.wire.errors import APIError, stream_end, wants_anthropic
from hybridrt.server.wire.sse import DONE, event, named_events

HELD_BYTES = 2**20  # of an answer, before the client gets any
COUNT_BYTES = 40  # of a line that counts tokens, at most
MAX_TARGET = 2**15  # characters of a path and its query
BUSY = (429, 502, 503)  # another replica may have room
_PASSED_ON = (
    "accept", "anthropic-beta", "anthropic-version", "authorization", "content-type", "traceparent", "tracestate",
    "x-api-key", "x-request-id", "x-request-timeout",
)  # fmt: skip
_PASSED_BACK = (
    b"cache-control", b"content-type", b"retry-after", b"warning", b"www-authenticate", b"x-accel-buffering",
)  # fmt: skip
_COUNT = re.compile(rb"^: tokens (\d{1,18})\n\n", re.MULTILINE)


class NothingSent(Exception):
    """The replica has not answered, or has no room. The client has got nothing. `answer`: the
    replica's, if there is one."""

    def __init__(self, why: str, answer: Response | None = None) -> None:
        super().__init__(why)
        self.answer = answer


def headers_for(scope: Scope, replica_key: str | None) -> dict[str, str]:
    """Headers of the request at a replica. The client's key goes with it, unless replicas have a
    key of their own."""
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    passed = {name: found[name] for name in _PASSED_ON if name in found}
    if replica_key is not None:
        passed.pop("x-api-key", None)
        passed["authorization"] = f"Bearer {replica_key}"
    return passed | {COUNT_HEADER.decode(): "1"}


def target_of(scope: Scope) -> str:
    """Path and query of the request at a replica. The path is quoted anew: what was quoted in it is
    no query there. APIError if it is longer than a URL may be."""
    query = quote(scope.get("query_string", b""), safe="%/:@!$&'()*+,;=~?[]")
    target = quote(scope["path"], safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
    if len(target) > MAX_TARGET:
        raise APIError(414, f"the path is too long: {len(target)} characters at a replica, at most {MAX_TARGET}")
    return target


class Forward:
    """One request on its way. `send_to` may be called again after NothingSent.

    Attributes:
        tokens: that the client has got in a stream, as far as the replica has said.
        cut: the replica has gone in the middle of the stream, and the client knows.
    """

    def __init__(self, scope: Scope, send: Send, body: bytes, headers: Mapping[str, str]) -> None:
        self._scope, self._send, self._body, self._headers = scope, send, body, dict(headers)
        self._target = target_of(scope)
        self.tokens, self.cut = 0, False
        self._begun = self._streams = False

    async def send_to(self, replica: ReplicaClient, placed_first: asyncio.Event) -> None:
        """Sends the request to a replica and its answer to the client.

        Raises:
            NothingSent: another replica can have the request.
        """
        exchange = Exchange(asyncio.ensure_future(self._exchange(replica, placed_first)))
        self._exchange_now = exchange
        replica.exchanges.add(exchange)
        try:
            await asyncio.shield(exchange.task)
        except asyncio.CancelledError:
            if not exchange.task.cancelled():  # this request itself is cancelled
                exchange.task.cancel()
                await asyncio.gather(exchange.task, return_exceptions=True)
                raise
            await self._cut(f"replica {replica.url} does not answer")
        except httpx.HTTPError as e:
            if isinstance(e, httpx.ConnectError):
                replica.leave(str(e))
            await self._cut(f"replica {replica.url} has ended the connection ({type(e).__name__})")
        finally:
            replica.exchanges.discard(exchange)

    async def _exchange(self, replica: ReplicaClient, first: asyncio.Event) -> None:
        url = replica.url + self._target
        async with replica.client.stream(
            self._scope["method"], url, headers=self._headers, content=self._body or None
        ) as answer:
            self._streams = answer.headers.get("content-type", "").startswith("text/event-stream")
            if answer.status_code in BUSY:
                held = await _limited(answer)
                raise NothingSent(f"{replica.url} answers {answer.status_code}", self._response(answer, held))
            held, whole = b"", True
            async for chunk in answer.aiter_raw():
                held, new = held + chunk, max(len(held) - COUNT_BYTES, 0)
                if self._streams and self._counted(held, new):
                    first.set()
                elif not self._begun and len(held) <= HELD_BYTES:
                    continue  # until the first token has come
                held, whole = await self._pass_on(answer, held), False
            first.set()
            if whole:
                await self._response(answer, _COUNT.sub(b"", held))(self._scope, self._no_body, self._send)
            else:
                await self._send({"type": "http.response.body", "body": held, "more_body": False})

    def _counted(self, data: bytes, start: int) -> bool:
        counts = _COUNT.findall(data, start)
        self.tokens = int(counts[-1]) if counts else self.tokens
        return bool(counts)

    async def _pass_on(self, answer: httpx.Response, data: bytes) -> bytes:
        """Returns the end of `data` that is no whole event yet, if there is one."""
        if not self._begun:
            self._begun = self._exchange_now.begun = True
            self._scope[FAILURE] = stream_end
            headers = self._headers_back(answer)
            await self._send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        events, end, rest = data.rpartition(b"\n\n")
        if not end and len(rest) > HELD_BYTES:
            events, rest = rest, b""
        await self._send({"type": "http.response.body", "body": _COUNT.sub(b"", events + end), "more_body": True})
        return rest

    async def _cut(self, why: str) -> None:
        """The replica is gone in the middle of an answer."""
        if not self._begun:
            raise NothingSent(why)
        if not self._streams:
            raise ConnectionError(f"{why} in the middle of an answer")  # the client's connection ends
        self.cut = True
        text = f"{why}; the answer is cut after {self.tokens} tokens: resume from token {self.tokens}"
        body = APIError(502, text, code="stream_cut").body(wants_anthropic(self._scope))
        body["error"]["resume_from"] = self.tokens
        last = b"".join(named_events([body])) if wants_anthropic(self._scope) else event(body) + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _response(self, answer: httpx.Response, body: bytes) -> Response:
        made = Response(body, answer.status_code)
        made.raw_headers = [*self._headers_back(answer), (b"content-length", str(len(body)).encode())]
        return made

    def _headers_back(self, answer: httpx.Response) -> list[tuple[bytes, bytes]]:
        return [(name.lower(), value) for name, value in answer.headers.raw if name.lower() in _PASSED_BACK]

    @staticmethod
    async def _no_body() -> dict[str, str]:
        raise NotImplementedError("the body has been read")


async def _limited(answer: httpx.Response) -> bytes:
    """The body of a refusal."""
    found = b""
    async for chunk in answer.aiter_raw():
        found += chunk
        if len(found) > HELD_BYTES:
            return b""
    return found
