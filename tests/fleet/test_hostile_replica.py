"""Replicas that send what no replica sends: a router reads no more than it must, and serves others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from hybridrt.base.errors import MessageError
from hybridrt.fleet import body_room, counted_stream, replica_client
from hybridrt.fleet.body_room import BodyRoom
from hybridrt.fleet.cache_messages import apply_message, layout_message
from hybridrt.fleet.counted_stream import CountedStream
from hybridrt.fleet.forward import Forward, target_of
from hybridrt.fleet.prefix_mirror import CacheLayout, PrefixMirror
from hybridrt.fleet.replica_client import ReplicaClient
from hybridrt.fleet.router import Router, RouterConfig, _fields
from hybridrt.fleet.short_answer import short_answer
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.wire.errors import APIError

URL = "http://replica:1"


class Drip(httpx.AsyncByteStream):
    """A body in parts. `sent`: how many were asked for."""

    def __init__(self, part: bytes, count: int, end: bytes = b"") -> None:
        self.part, self.count, self.end, self.sent = part, count, end, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.count):
            self.sent += 1
            yield self.part
        yield self.end


def replica_with(body: Drip, kind: str = "text/plain", **headers: str) -> httpx.AsyncClient:
    given = {"content-type": kind} | headers
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, headers=given, stream=body)))


def scope(path: str, query: bytes = b"") -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": []}


def test_an_answer_without_an_end_is_left() -> None:
    body = Drip(b"x" * 1024, 10_000)
    replica = ReplicaClient(URL, replica_with(body), ready=True)
    for _ in range(replica_client.LEFT_AFTER):
        asyncio.run(replica.ask())
    assert not replica.ready and body.sent < 200


def test_a_packed_answer_is_not_unpacked() -> None:
    client = replica_with(Drip(b"no gzip", 1), **{"content-encoding": "gzip"})
    assert asyncio.run(short_answer(client, "GET", URL, 100)).body == b"no gzip"
    body = Drip(b"x", 1000)
    assert asyncio.run(short_answer(replica_with(body), "GET", URL, None)).status == 200 and body.sent == 0


def test_a_content_type_goes_back_as_it_came() -> None:
    kind = "text/é☃".encode()
    answer = httpx.Response(200, headers=[(b"content-type", kind)], stream=Drip(b"x", 1))
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))
    assert str(asyncio.run(short_answer(client, "GET", URL, 100)).kind).encode("latin-1") == kind


def test_an_event_that_is_deep_is_refused() -> None:
    event = b'{"type":"BlockStored","medium":"GPU","more":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(MessageError, match="no event"):
        apply_message(event, PrefixMirror(CacheLayout(16, False)))


def test_events_are_split_wherever_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(body: Drip) -> list[bytes]:
        async with replica_with(body).stream("GET", URL) as answer:
            return [event async for event in replica_client._events(answer)]

    for part in (b"a", b"\n", b"a\n\nb", b"\n\nab\n"):
        body = part * 9
        assert asyncio.run(read(Drip(part, 9))) == body.split(b"\n\n")[:-1]
    monkeypatch.setattr(replica_client, "MAX_EVENT_BYTES", 50)
    with pytest.raises(MessageError, match="more than 50 bytes"):
        asyncio.run(read(Drip(b"x", 60)))


def test_cookies_are_not_kept() -> None:
    router = Router(RouterConfig(ServerConfig(port=0), (URL,)))
    answer = httpx.Response(200, headers={"set-cookie": "a=1"}, request=httpx.Request("GET", URL))
    router._client.cookies.extract_cookies(answer)
    assert not list(router._client.cookies.jar)
    assert router._client.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("path", ["/v1/../fleet/cache_events", "/v1/responses/..", "/./health"])
def test_a_path_that_leads_up_is_refused(path: str) -> None:
    router = Router(RouterConfig(ServerConfig(port=0), (URL,)))
    with pytest.raises(APIError, match="no such path"):
        asyncio.run(router(scope(path), None, None))  # type: ignore[arg-type]


def test_a_body_of_very_many_values_is_not_read() -> None:
    assert _fields(b'{"prompt":[' + b"1," * 5000 + b'1],"cache_salt":"a"}')["cache_salt"] == "a"
    assert _fields(b'{"prompt":[' + b"1," * 1_200_000 + b'1],"cache_salt":"a"}') == {}
    assert _fields(b'{"prompt":[' + b"[]," * 140_000 + b'1],"cache_salt":"a"}') == {}


def test_a_quoted_path_stays_a_path() -> None:
    url = httpx.URL(URL + target_of(scope("/v1/responses/a?b#c d%2e/\n", b"stream=true")))
    assert url.path == "/v1/responses/a?b#c d%2e/\n" and url.query == b"stream=true"


def test_a_count_that_is_no_number_is_text() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    body = Drip(b": tokens " + b"9" * 5000 + b"\n\n", 1, b": tokens 7\n\n")
    forward = Forward(scope("/v1/completions"), send, b"", {})
    asyncio.run(_forwarded(forward, ReplicaClient(URL, replica_with(body, "text/event-stream"))))
    assert forward._stream.tokens == 7 and sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_is_given_out_up_to_its_counts(size: int) -> None:
    text = b'data: {"a":1}\n\n: tokens 2 5 6\n\n: beat\n\ndata: {"b":": tokens 9"}\n\n: tokens 3 7\n\ndata: half'
    stream, given = CountedStream(), bytearray()
    for start in range(0, len(text), size):
        given += stream.feed(text[start : start + size])
    assert stream.tokens == 0 and stream.counted
    stream.given()
    assert (stream.tokens, stream.ids) == (3, [5, 6, 7]) and stream.rest() == b"data: half"
    assert given == b'data: {"a":1}\n\n: beat\n\ndata: {"b":": tokens 9"}\n\n'


def test_what_no_count_has_told_cannot_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_stream, "MAX_HELD_BYTES", 50)
    stream = CountedStream([4])
    assert stream.ids == [4] and stream.feed(b"x" * 51) == b"x" * 50 and stream.ids is None
    other = CountedStream()
    other.feed(b": tokens 4 5\n\n")
    other.given()
    assert other.tokens == 4 and other.ids is None


def test_events_leave_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "TURN_SECONDS", 0)
    others = 0

    async def read() -> None:
        nonlocal others
        async with replica_with(Drip(b"a\n\n" * 20, 1)).stream("GET", URL) as answer:
            async for _ in replica_client._events(answer):
                asyncio.get_running_loop().call_soon(count)

    def count() -> None:
        nonlocal others
        others += 1

    asyncio.run(read())
    assert others >= 19


def test_events_that_cannot_be_are_read_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "EVENT_PAUSES", (0.0, 0.01, 0.02, 9.0))
    event = b"event: layout\ndata: %b\n\ndata: wrong\n\n" % layout_message(CacheLayout(1, True, windows=()))
    asked = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(200, stream=Drip(event, 1))

    async def follow() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        with suppress(TimeoutError):
            await asyncio.wait_for(ReplicaClient(URL, client, "key").follow(), 0.5)

    asyncio.run(follow())
    assert asked == 3


def test_large_bodies_have_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "MAX_BYTES", 100_000)
    room, parts = BodyRoom(), [b"x" * 40_000, b"x" * 40_000]

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    async def fill() -> None:
        async with room.read(receive) as body:
            assert len(body) == room.used == 80_000
            parts[:] = [b"x" * 10_000]
            async with room.read(receive) as small:
                assert len(small) == 10_000
            parts[:] = [b"x" * 40_000]
            with pytest.raises(APIError, match="memory"):
                async with room.read(receive):
                    raise AssertionError("it has no room")
            assert room.used == 80_000
        assert room.used == 0
        monkeypatch.setattr(body_room, "BODY_SECONDS", 0.01)
        with pytest.raises(APIError, match="has not come"):
            async with room.read(asyncio.Event().wait):  # type: ignore[arg-type]
                raise AssertionError("it never comes")

    asyncio.run(fill())


async def _forwarded(forward: Forward, replica: ReplicaClient) -> None:
    await forward.send_to(replica, asyncio.Event())
