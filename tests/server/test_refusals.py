"""Large bodies that are refused: their sender rests, and nobody else does."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrt.server.core import refusals
from hybridrt.server.core.bodies import SMALL as LARGE
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.guard import Guard
from hybridrt.server.core.refusals import MAX_CLIENTS, MAX_REST, REST, LargeBody, Refusals
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(refusals, "time", made)
    # Servers of other tests go on sleeping in their own loops.
    monkeypatch.setattr(refusals, "asyncio", SimpleNamespace(sleep=made.sleep_in_loop))
    return made


def send(
    found: Refusals, clock: Clock, size: int, status: int, took: float, client: str = "a", key: bytes = b""
) -> None:
    """A request whose body is received, and answered after `took` seconds."""
    headers = {b"content-length": str(size).encode()}

    async def receive() -> Any:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    body = LargeBody(found, headers, receive)
    body.client = client, key
    asyncio.run(body.receive())
    clock.now += took
    body.ended(status)


def test_a_client_rests_before_its_next_large_body(clock: Clock) -> None:
    found = Refusals()
    send(found, clock, LARGE + 1, 400, 0.01)
    assert clock.slept == []
    send(found, clock, LARGE + 1, 413, 0.02)
    assert clock.slept == [pytest.approx(REST * 0.01)]
    send(found, clock, LARGE + 1, 200, 9.0)
    assert clock.slept[1:] == [pytest.approx(REST * 0.02)]
    send(found, clock, LARGE + 1, 200, 9.0)
    assert len(clock.slept) == 2, "what was taken costs nothing"


@pytest.mark.parametrize(
    ("size", "client", "key"), [(LARGE, "a", b""), (LARGE + 1, "b", b""), (LARGE + 1, "a", b"other")]
)
def test_small_bodies_and_other_clients_do_not_wait(size: int, client: str, key: bytes, clock: Clock) -> None:
    found = Refusals()
    send(found, clock, LARGE + 1, 400, 1.0)
    send(found, clock, size, 200, 0.0, client, key)
    assert clock.slept == []


def test_small_refusals_and_clients_that_left_cost_nothing(clock: Clock) -> None:
    found = Refusals()
    send(found, clock, LARGE, 400, 1.0)
    send(found, clock, LARGE + 1, 499, 1.0)
    send(found, clock, LARGE + 1, 200, 0.0)
    assert clock.slept == []


def test_rests_and_clients_are_bounded(clock: Clock) -> None:
    found = Refusals()
    for i in range(MAX_CLIENTS + 10):
        send(found, clock, LARGE + 1, 400, 0.0, str(i))
        found.note(("z", b""), 100.0)
    assert found.rest(("z", b"")) == MAX_REST and len(found._until) <= MAX_CLIENTS


@pytest.mark.parametrize(("keys", "counted"), [((), b""), (("one", "two"), b"two")])
def test_a_key_tells_clients_apart_only_where_it_is_checked(keys: tuple[str, ...], counted: bytes) -> None:
    guard = Guard(no_app, ServerConfig(api_keys=keys))
    headers = {b"authorization": b"bearer  two", b"x-api-key": b"made up", b"content-type": b"application/json"}
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": list(headers.items())}
    assert guard._check(scope, headers) == counted


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request gets so far")
