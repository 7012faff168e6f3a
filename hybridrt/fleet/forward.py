"""Sends a request to a replica and its answer back; to another replica if nothing has come back yet."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from urllib.parse import quote

import httpx
from starlette.responses import Response
from starlette.types import Scope, Send

from hybridrt.base.errors import MessageError
from hybridrt.fleet.answer_form import ANY, AnswerForm
from hybridrt.fleet.counted_stream import MAX_HELD_BYTES, CountedStream
from hybridrt.fleet.replica_client import Exchange, ReplicaClient
from hybridrt.server.core.respond import COUNT_HEADER, FAILURE
from hybridrt.server.wire.errors import APIError, stream_end, wants_anthropic
from hybridrt.server.wire.sse import DONE, event, named_events

MAX_TARGET = 2**15  # characters of a path and its query
BUSY = (429, 502, 503)  # another replica may have room
SLOW_CLIENT = 1.0  # seconds in which a client reads what it is sent
# A body that is no stream is whole when its first byte comes: seconds that it may take, and bytes for a second more.
BODY_SECONDS, BODY_RATE = 30.0, 2**16
_PASSED_ON = (
    b"accept", b"anthropic-beta", b"anthropic-version", b"authorization", b"content-type", b"traceparent",
    b"tracestate", b"x-api-key", b"x-request-id", b"x-request-timeout",
)  # fmt: skip
_PASSED_BACK = (
    b"cache-control", b"content-type", b"retry-after", b"warning", b"www-authenticate", b"x-accel-buffering",
)  # fmt: skip


class NotAnswered(Exception):
    """Another replica can have the request, or the rest of its stream.

    Attributes:
        answer: the replica's refusal, if there is one.
        lost: the replica has got the request, and has ended or does not answer.
        cut: it has not answered it whole.
        wrong: its answer has not the form of one.
    """

    def __init__(
        self, why: str, answer: Response | None = None, *, lost: bool = False, cut: bool = False, wrong: bool = False
    ) -> None:
        super().__init__(why)
        self.answer, self.lost, self.cut, self.wrong = answer, lost, lost or cut or wrong, wrong


def headers_for(scope: Scope, replica_key: str | None) -> dict[bytes, bytes]:
    """Headers of the request at a replica, as bytes: they need not be ASCII. The client's key goes
    with it, unless replicas have a key of their own."""
    found: dict[bytes, bytes] = dict(scope["headers"])
    # Blanks around a value are no part of it, and the parser leaves those after it.
    passed = {name: found[name].strip(b" \t") for name in _PASSED_ON if name in found}
    if replica_key is not None:
        passed.pop(b"x-api-key", None)
        passed[b"authorization"] = b"Bearer " + replica_key.encode()
    return passed | {COUNT_HEADER: b"1"}


def target_of(scope: Scope) -> str:
    """Path and query of the request at a replica. The path is quoted anew: what was quoted in it is
    no query there. APIError if it is longer than a URL may be."""
    query = quote(scope.get("query_string", b""), safe="%/:@!$&'()*+,;=~?[]")
    target = quote(scope["path"], safe="/:@!$&'()*+,;=~") + (f"?{query}" if query else "")
    if len(target) > MAX_TARGET:
        raise APIError(414, f"the path is too long: {len(target)} characters at a replica, at most {MAX_TARGET}")
    return target


class Forward:
    """One request on its way. `send_to` may be called again after NotAnswered.

    Args:
        body: of the request; it may be replaced before the next call of `send_to`.
        form: of an answer.
        ids: first tokens of the answer that the client has already.

    Attributes:
        begun: the client has got the beginning of an answer.
        model: of the replica that has given it; "" if it is not known.
    """

    def __init__(
        self, scope: Scope, send: Send, body: bytes, headers: Mapping[bytes, bytes], form: AnswerForm = ANY,
        ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._scope, self._send, self._headers = scope, send, dict(headers)
        self.body, self.begun, self._streams, self.model = body, False, False, ""
        self._client_was_slow = False
        self._form, self._stream, self._target = form, CountedStream(ids), target_of(scope)

    @property
    def ids(self) -> list[int] | None:
        """Tokens of the stream that the client has got; None: they are not known."""
        return self._stream.ids

    def may_have(self, replica: ReplicaClient) -> bool:
        """Whether the rest of the answer may come from a replica: another model would give another one."""
        return not self.begun or self.model in ("", replica.model)

    async def send_to(self, replica: ReplicaClient, placed_first: asyncio.Event) -> None:
        """Sends the request to a replica and its answer to the client.

        Raises:
            NotAnswered: another replica can have the request, or `end_cut` ends it.
        """
        if not self.begun:
            self.model = replica.model
        exchange = Exchange(asyncio.ensure_future(self._exchange(replica, placed_first)), replica.circuit.begin())
        self._exchange_now = exchange
        replica.exchanges.add(exchange)
        try:
            await asyncio.shield(exchange.task)
            if self._form.known:
                replica.answers_rightly(exchange.since)
        except asyncio.CancelledError:
            if not exchange.task.cancelled():  # this request itself is cancelled
                exchange.task.cancel()
                await asyncio.gather(exchange.task, return_exceptions=True)
                raise
            self._lose(f"replica {replica.url} does not answer")
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
            if isinstance(e, httpx.ConnectError):
                replica.leave(str(e))
            raise NotAnswered(f"replica {replica.url} takes no connection") from e
        except httpx.HTTPError as e:
            # The request is the reason of a local error, and a client that was slow to read may be that of others.
            if not isinstance(e, httpx.LocalProtocolError) and not self._client_was_slow:
                replica.answers_wrongly("connection", f"{type(e).__name__}: {e}")
            self._lose(f"replica {replica.url} has ended the connection ({type(e).__name__})")
        except MessageError as e:
            replica.answers_wrongly("form", str(e))
            self._lose(f"replica {replica.url} answers wrongly: {e}", wrong=True)
        finally:
            replica.exchanges.discard(exchange)
            if exchange.trial:
                replica.circuit.tried()

    def _lose(self, why: str, wrong: bool = False) -> None:
        if self.begun and not self._streams:
            raise ConnectionError(f"{why} in the middle of an answer")  # the client's connection ends
        raise NotAnswered(why, lost=not wrong, wrong=wrong)

    async def end_cut(self, why: str) -> None:
        """Ends a stream that has begun, and says how it can go on."""
        tokens, ids = self._stream.tokens, self._stream.ids
        text = f"{why}; the answer is cut after {tokens} tokens: resume from token {tokens}"
        body = APIError(502, text, code="stream_cut").body(wants_anthropic(self._scope))
        body["error"]["resume_from"] = tokens
        if ids:
            body["error"]["resume_token_ids"] = ids
        last = b"".join(named_events([body])) if wants_anthropic(self._scope) else event(body) + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _exchange(self, replica: ReplicaClient, first: asyncio.Event) -> None:
        url = replica.url + self._target
        client, method = replica.client, self._scope["method"]
        request = client.build_request(method, url, headers=self._headers, content=self.body or None)
        async with aclosing(await _head(client, request)) as answer:
            kind, status = answer.headers.get("content-type", ""), answer.status_code
            streams = kind.startswith("text/event-stream")
            if status not in BUSY:
                self._form.check_head(status, kind)
            # A path that is known is missing at no replica: it has another model, or not this response.
            refused = status in BUSY or (status == 404 and self._form.known)
            if refused or (self.begun and not (streams and status == 200)):
                held = await _limited(answer)
                raise NotAnswered(f"{replica.url} answers {status}", self._response(answer, held))
            self._streams = streams
            if streams:
                await self._pass_stream(replica, answer, first)
            else:
                await self._pass_whole(replica, answer, first)

    async def _pass_stream(self, replica: ReplicaClient, answer: httpx.Response, first: asyncio.Event) -> None:
        """What no count has told stays here: if the replica is lost, another one writes it anew."""
        stream = self._stream = CountedStream(self._stream.ids or (), self._form)
        async for chunk in answer.aiter_raw():
            ready = stream.feed(chunk)
            if stream.counted:
                first.set()
            if ready:
                await self._pass_on(replica, answer, ready)
                stream.given()
            if stream.goes_elsewhere:
                # One that is shutting down has said so before; of another one the request may be the reason.
                raise NotAnswered(f"replica {replica.url} cannot go on", lost=replica.ready, cut=True)
        await self._end(answer, stream.rest(), first)

    async def _pass_whole(self, replica: ReplicaClient, answer: httpx.Response, first: asyncio.Event) -> None:
        held = bytearray()
        async for chunk in _parts(answer):
            held += chunk
            if self.begun or len(held) > MAX_HELD_BYTES:
                if not self.begun:
                    self._form.check_first_bytes(bytes(held[:64]))
                await self._pass_on(replica, answer, bytes(held))
                held.clear()
        if not self.begun:
            self._form.check_whole(answer.status_code, bytes(held))
        await self._end(answer, bytes(held), first)

    async def _pass_on(self, replica: ReplicaClient, answer: httpx.Response, data: bytes) -> None:
        self._exchange_now.begun = True
        if self._exchange_now.trial:
            replica.circuit.tried()
        if not self.begun:
            self.begun = True
            self._scope[FAILURE] = stream_end
            headers = self._headers_back(answer)
            await self._send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        began = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._client_was_slow |= time.monotonic() - began > SLOW_CLIENT

    async def _end(self, answer: httpx.Response, data: bytes, first: asyncio.Event) -> None:
        first.set()
        if self.begun:
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            await self._response(answer, data)(self._scope, self._no_body, self._send)

    def _response(self, answer: httpx.Response, body: bytes) -> Response:
        made = Response(body, answer.status_code)
        made.raw_headers = [*self._headers_back(answer), (b"content-length", str(len(body)).encode())]
        return made

    def _headers_back(self, answer: httpx.Response) -> list[tuple[bytes, bytes]]:
        return [(name.lower(), value) for name, value in answer.headers.raw if name.lower() in _PASSED_BACK]

    @staticmethod
    async def _no_body() -> dict[str, str]:
        raise NotImplementedError("the body has been read")


async def _head(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Status and headers. MessageError: they are no HTTP."""
    try:
        return await client.send(request, stream=True)
    except httpx.RemoteProtocolError as e:
        if e.__cause__ is None or e.__cause__.__context__ is None:  # no parser is the reason: the connection has ended
            raise
        raise MessageError(f"it sends no HTTP ({e})") from e


async def _limited(answer: httpx.Response) -> bytes:
    """The body of a refusal."""
    found = bytearray()
    async for chunk in _parts(answer):
        found += chunk
        if len(found) > MAX_HELD_BYTES:
            return b""
    return bytes(found)


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Of a body that is no stream. MessageError if the replica takes too long; the client's time does not count."""
    parts, left = answer.aiter_raw(), BODY_SECONDS
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(left):
                part = await anext(parts, None)
        except TimeoutError as e:
            raise MessageError(f"the body of the answer has not come within {BODY_SECONDS:g} seconds") from e
        if part is None:
            return
        left += len(part) / BODY_RATE - (time.monotonic() - began)
        yield part
