"""Replicas that call themselves ready and answer what is no answer: they are put aside, and nobody notices."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import httpx
import pytest

from hybridrt.base import circuit
from hybridrt.base.circuit import PAUSES, TRIAL, Circuit
from hybridrt.base.errors import MessageError
from hybridrt.engine.api.llm import LLM
from hybridrt.fleet import counted_stream, forward, sender
from hybridrt.fleet.answer_form import AnswerForm
from hybridrt.fleet.counted_stream import CountedStream
from hybridrt.fleet.forward import Forward, NotAnswered
from hybridrt.fleet.replica_client import ReplicaClient
from hybridrt.server.wire.sse import DONE
from tests.support.http_server import Served, serving
from tests.support.one_layer import write_first_layer
from tests.support.routing import FLEET_KEY, Routed, failing, routing

BODY = {"model": "tested", "prompt": "def read_lines(path):", "max_tokens": 6, "temperature": 0}
FLEET = {"Authorization": f"Bearer {FLEET_KEY}"}
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
JSON = OK + b"content-type: application/json\r\n"
EVENTS = OK + b"content-type: text/event-stream\r\n\r\n"
ANSWER = b'{"model":"tested","choices":[{"index":0,"text":"wrong"}]}'


def whole(head: bytes, body: bytes) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_first_layer(tmp_path_factory.mktemp("wrong") / "embedded")
    with (
        LLM(str(path), device="cpu", max_running_requests=8, max_model_len=256) as llm,
        serving(llm, fleet_key=FLEET_KEY) as served,
    ):
        yield served


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the test is, the replica stays aside."""
    monkeypatch.setattr(circuit, "PAUSES", (600.0,))


NO_HTTP = {
    "no HTTP": (b"garbage\x00\xff\r\n\r\n", b""),
    "an endless header": (OK, b"x-more: " + b"y" * 1000 + b"\r\n"),
    "an endless name of a header": (OK + b"x", b"y" * 1000),
}
ENDS = {
    "wrong chunks": (JSON + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n", b""),
    "too short": (JSON + b"content-length: 99\r\n\r\n{}", b""),
    "nothing": (b"", b""),
}
FORM_FAULTS = {
    "a page": whole(OK + b"content-type: text/html\r\n", b"<html>welcome</html>"),
    "no content type": whole(OK, ANSWER),
    "a page that is missing": whole(b"HTTP/1.1 404 x\r\ncontent-type: text/html\r\n", b"<html>"),
    "a page of an error": whole(b"HTTP/1.1 500 x\r\ncontent-type: text/html\r\n", b"<html>"),
    "another address": whole(b"HTTP/1.1 302 x\r\nlocation: http://a/\r\n", b""),
    "an error without one": whole(b"HTTP/1.1 500 x\r\ncontent-type: application/json\r\n", b"{}"),
    "no JSON": whole(JSON, b'{"choices": [tru'),
    "bytes": whole(JSON, bytes(range(256))),
    "a list": whole(JSON, b"[1]"),
    "deep": whole(JSON, b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no choices": whole(JSON, b'{"model":"tested","output":[]}'),
    "another model": whole(JSON, ANSWER.replace(b"tested", b"other")),
}
STREAM_FAULTS = {
    "no events": EVENTS + b"hello\n\nhello\n\n" + DONE,
    "an event that is no JSON": EVENTS + b'data: {"choices":[}\n\n' + DONE,
    "an event without choices": EVENTS + b'data: {"text":"x"}\n\n' + DONE,
    "an event of another model": EVENTS + b'data: {"model":"other","choices":[]}\n\n: tokens 1\n\n' + DONE,
    "an end too early": EVENTS + b'data: {"model":"tested","choices":[]}\n\n',
    "nothing": EVENTS,
    "no stream": whole(JSON, ANSWER),
}


def check_put_aside(router: Routed, bad: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """It had one request, and it is named with the reason."""
    with router.http() as client:
        facts = {fact["url"]: fact for fact in client.get("/fleet/replicas", headers=FLEET).json()}
        metrics = client.get("/metrics").text
    assert facts[bad]["aside"] and facts[bad]["wrong_answer"]
    assert f'hybridrt_router_wrong_answers_total{{reason="{reason}",replica="{bad}"}} 1.0' in metrics
    assert f'hybridrt_router_replica_ready{{replica="{bad}"}} 0.0' in metrics
    assert f'hybridrt_router_requests_total{{replica="{bad}"}} 1.0' in metrics
    (told,) = [record.getMessage() for record in caplog.records if "put aside" in record.getMessage()]
    assert bad in told and reason in told and facts[bad]["wrong_answer"] in told


def ask(router: Routed, count: int, **more: Any) -> None:
    """Answers that are whole and of the good replica."""
    for _ in range(count):
        answer = router.post("/v1/completions", BODY | more)
        assert answer.status_code == 200 and "wrong" not in answer.text and '"error"' not in answer.text, answer.text
        assert answer.text.endswith("data: [DONE]\n\n") if more.get("stream") else answer.json()["choices"]


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("name", [*NO_HTTP, *ENDS])
def test_what_is_no_http_puts_a_replica_aside(name: str, replica: Served, caplog: pytest.LogCaptureFixture) -> None:
    first, endless = (NO_HTTP | ENDS)[name]
    with caplog.at_level(logging.INFO), failing(first, endless=endless) as bad, routing(bad, replica.url) as router:
        router.wait_for(2)
        ask(router, 3)
        check_put_aside(router, bad, "form" if name in NO_HTTP else "connection", caplog)


@pytest.mark.usefixtures("long_pauses")
def test_several_replicas_that_answer_wrongly_cost_a_request_nothing(replica: Served) -> None:
    """They are no reason to blame it, and no tries of it."""
    first, endless = NO_HTTP["an endless header"]
    with ExitStack() as stack:
        bad = [stack.enter_context(failing(first, endless=endless)) for _ in range(3)]
        bad += [stack.enter_context(failing(FORM_FAULTS["a page"])) for _ in range(3)]
        router = stack.enter_context(routing(*bad, replica.url))
        router.wait_for(7)
        ask(router, 3)


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("name", FORM_FAULTS)
def test_what_is_no_answer_puts_a_replica_aside(name: str, replica: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), failing(FORM_FAULTS[name]) as bad, routing(bad, replica.url) as router:
        router.wait_for(2)
        ask(router, 3)
        check_put_aside(router, bad, "form", caplog)


@pytest.mark.usefixtures("long_pauses")
@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_what_is_no_stream_puts_a_replica_aside(name: str, replica: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), failing(STREAM_FAULTS[name]) as bad, routing(bad, replica.url) as router:
        router.wait_for(2)
        ask(router, 3, stream=True)
        check_put_aside(router, bad, "form", caplog)


@pytest.mark.usefixtures("long_pauses")
def test_a_stream_that_was_not_asked_for(replica: Served, caplog: pytest.LogCaptureFixture) -> None:
    with failing(EVENTS + b"data: [DONE]\n\n") as bad, routing(bad, replica.url) as router:
        router.wait_for(2)
        ask(router, 3)
        check_put_aside(router, bad, "form", caplog)


@pytest.mark.usefixtures("long_pauses")
def test_without_another_replica_the_client_learns_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "READY_SECONDS", 0.1)
    with failing(FORM_FAULTS["a page"]) as bad, routing(bad) as router:
        router.wait_for(1)
        answer = router.post("/v1/completions", BODY)
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "wrong_answer"
        assert bad in answer.json()["error"]["message"] and "text/html" in answer.json()["error"]["message"]
        with router.http() as client:
            assert client.get("/ready").status_code == 503


def test_a_replica_that_answers_rightly_again_comes_back(
    replica: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(circuit, "PAUSES", (0.0,))
    with caplog.at_level(logging.INFO), routing(replica.url) as router:
        router.wait_for(1)
        known = router.router.replicas[0]
        known.answers_wrongly("form", "it was wrong once")
        ask(router, 1)
        Routed.wait_until(lambda: known.circuit.why is None and known.circuit.takes_requests)
    assert any("rightly again" in record.getMessage() for record in caplog.records)


def test_a_field_that_a_path_ignores_blames_no_replica(replica: Served) -> None:
    """Embeddings do not stream, whatever the request says."""
    with routing(replica.url) as router:
        router.wait_for(1)
        body = {"input": "x", "stream": True, "model": BODY["model"]}
        answer = router.post("/v1/embeddings", body)
        assert answer.status_code == 200 and answer.json()["data"]
        assert router.router.replicas[0].circuit.why is None


def test_a_model_that_one_replica_lacks_is_asked_of_another(replica: Served) -> None:
    missing = b'{"error":{"message":"there is no model","code":"model_not_found"}}'
    refusal = whole(b"HTTP/1.1 404 x\r\ncontent-type: application/json\r\n", missing)
    with failing(refusal) as other, routing(other, replica.url) as router:
        router.wait_for(2)
        ask(router, 4)
        assert not any(each.circuit.why for each in router.router.replicas)
        unknown = router.post("/v1/completions", BODY | {"model": "unknown"})
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"


def test_pauses_grow_until_an_answer_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hybridrt.base.circuit.time.monotonic", lambda: now)
    tested, pauses = Circuit(), list[float]()
    for _ in range(9):
        pause = tested.wrong("x")
        assert pause is not None and tested.is_aside and tested.wrong("again") is None, "one pause at a time"
        began = now
        pauses.append(pause)
        now += pause
        assert not tested.right(began) and tested.why == "x", "what began before does not end it"
        assert tested.takes_requests and tested.begin() and not tested.takes_requests, "one request tries it"
        tested.tried()
        assert tested.takes_requests and tested.begin()
        now += TRIAL
        assert tested.takes_requests, "a trial that takes long does not keep all others away"
        tested.tried()
    assert pauses == [*PAUSES, PAUSES[-1], PAUSES[-1]] and all(a < b for a, b in pairwise(PAUSES))
    assert tested.right(now) and not tested.begin() and tested.wrong("x") == PAUSES[0]


@pytest.mark.parametrize("status", [199, 204, 302, 600])
def test_a_status_that_no_answer_has(status: int) -> None:
    with pytest.raises(MessageError, match=f"the status is {status}"):
        AnswerForm("/v1/completions").check_head(status, "application/json")
    AnswerForm("/docs").check_head(status, "text/html")
    for unread in (400, 414, 431):
        AnswerForm("/v1/completions").check_head(unread, "text/plain")


def test_what_another_path_answers_ends_no_trial() -> None:
    replica, _ = given(httpx.Response(200, stream=httpx.ByteStream(b"a page")))
    scope = {"type": "http", "method": "GET", "path": "/docs", "query_string": b"", "headers": []}

    async def send(message: Any) -> None:
        del message

    replica.circuit.why = "it was wrong"
    asyncio.run(Forward(scope, send, b"", {}).send_to(replica, asyncio.Event()))
    assert replica.circuit.why == "it was wrong" and replica.circuit.takes_requests


def given(answer: httpx.Response, **more: Any) -> tuple[ReplicaClient, Forward]:
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}

    async def send(message: Any) -> None:
        del message

    form = AnswerForm.of_request("POST", "/v1/completions", BODY | more)
    return ReplicaClient("http://replica:1", client), Forward(scope, send, b"{}", {}, form)


def test_a_stream_that_goes_wrong_in_its_middle_can_go_on_elsewhere() -> None:
    class Parts(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            yield b'data: {"choices":[]}\n\n: tokens 3 5 6 7\n\n'
            yield b'data: {"choices":[]}\n\ndata: {broken\n\n: tokens 4 8\n\n'

    replica, request = given(
        httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Parts()), stream=True
    )
    with pytest.raises(NotAnswered, match="answers wrongly") as caught:
        asyncio.run(request.send_to(replica, asyncio.Event()))
    assert caught.value.cut and not caught.value.lost and request.begun and request.ids == [5, 6, 7]
    assert replica.circuit.is_aside


def test_a_body_that_does_not_come_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "BODY_SECONDS", 0.05)

    class Never(httpx.AsyncByteStream):
        async def __aiter__(self) -> Any:
            while True:
                yield b" "
                await asyncio.sleep(0.01)

    for status in (200, 503):
        answer = httpx.Response(status, headers={"content-type": "application/json"}, stream=Never())
        replica, request = given(answer)
        with pytest.raises(NotAnswered, match="has not come within"):
            asyncio.run(request.send_to(replica, asyncio.Event()))
        assert replica.circuit.is_aside


def test_a_large_body_that_is_no_json_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_HELD_BYTES", 100)
    for body, fits in ((b"x" * 500, False), (b'{"choices":[' + b" " * 500 + b"]}", True)):
        answer = httpx.Response(200, headers={"content-type": "application/json"}, stream=httpx.ByteStream(body))
        replica, request = given(answer)
        if fits:
            asyncio.run(request.send_to(replica, asyncio.Event()))
        else:
            with pytest.raises(NotAnswered, match="no JSON object"):
                asyncio.run(request.send_to(replica, asyncio.Event()))
        assert request.begun is fits and replica.circuit.is_aside is not fits


def test_an_event_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_stream, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(counted_stream, "MAX_EVENT_BYTES", 1000)
    form = AnswerForm("/v1/completions")
    endless, garbage = CountedStream((), form), CountedStream((), form)
    with pytest.raises(MessageError, match="more than 1000 bytes"):
        for number in range(50):
            assert len(endless.feed(b"data: {" if number == 0 else b"x" * 99)) < 300
    with pytest.raises(MessageError, match="a line of the stream"):
        garbage.feed(b"x" * 101)


@pytest.mark.parametrize("size", [1, 3, 101, 5000])
def test_a_large_last_event_is_an_end(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_stream, "MAX_HELD_BYTES", 100)
    data = b'data: {"response":"%b"}\n\n' % (b"x" * 500)
    for tail, ends in ((b"event: response.completed\n" + data, True), (b"event: response.created\n" + data, False)):
        stream, text, got = CountedStream((), AnswerForm("/v1/responses")), b'data: {"a":1}\n\n' + tail, b""
        for start in range(0, len(text), size):
            got += stream.feed(text[start : start + size])
        if ends:
            assert got + stream.rest() == text
        else:
            with pytest.raises(MessageError, match="last event"):
                stream.rest()


def test_requests_of_other_paths_have_no_form(replica: Served) -> None:
    with routing(replica.url) as router, router.http() as client:
        router.wait_for(1)
        assert client.get("/docs").headers["content-type"].startswith("text/html")
        assert client.get("/v1/models").status_code == 200 and client.get("/nothing").status_code == 404
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert router.router.replicas[0].circuit.why is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_of_a_server_has_the_form(path: str, stream: bool, replica: Served) -> None:
    """Right ones, long ones and errors."""
    said = {"messages": [{"role": "user", "content": "x"}], "input": "x", "stream": stream, "seed": 1}
    with routing(replica.url) as router:
        router.wait_for(1)
        for more in ({}, {"temperature": 5000}, {"model": "other"}, {"max_tokens": 9**9}, {"model": None}):
            router.post(path, BODY | said | more)
        assert router.router.metrics.retries._value.get() == 0 and router.router.replicas[0].circuit.why is None
