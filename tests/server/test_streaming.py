"""How deltas become bytes of a stream: at once while the client reads, joined while it does not, first tokens first."""

import asyncio
import json
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.async_llm import AsyncLLM, DeltaStream
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.reply import Reply
from hybridrt.server.core.respond import EventStream
from hybridrt.server.wire.http_limits import BODY_WRITER, BodyWriter
from hybridrt.server.wire.sse import Parts, Slices, event, named_events, pieces
from tests.server.test_concurrency import address, expected, fetch, token_ids
from tests.support.fake_llm import make
from tests.support.http_server import WAIT, Served


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT))


LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=2)


def delta(text: str, **end: Any) -> Delta:
    return Delta("r", 0, [5], text, **end)


class Client:
    """One that reads, or does not: its stream, and what was written for it, by which way."""

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.flow: Any = SimpleNamespace(write_paused=False)
        transport = SimpleNamespace(write=lambda data: self.written.append(("now", data)))
        self.cycle: Any = SimpleNamespace(flow=self.flow, disconnected=False, transport=transport)
        self.deltas = DeltaStream(cast(Any, None))
        self.deltas.running = 1
        self.gain = lambda delta: delta.text.encode()
        reply = SimpleNamespace(
            deltas=self.deltas,
            failure=None,
            opening=lambda: iter(()),
            gain=lambda d: iter((self.gain(d),)),
            closing=lambda: iter((b"end",)),
            weight=lambda d: 0,
            closing_weight=lambda: 0,
            in_thread=None,
            facts=dict,
            resumes=False,
        )
        scope = {"type": "http", "path": "/", "extensions": {BODY_WRITER: BodyWriter(self.cycle, chunked=True)}}
        answer = EventStream(cast(Reply, reply))
        self.task = asyncio.ensure_future(answer(scope, asyncio.Event().wait, self.send))  # type: ignore[arg-type]

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message.get("body"):
            self.written.append(("send", message["body"]))

    def stop(self) -> None:
        self.flow.write_paused = True
        self.reads.clear()

    def go_on(self) -> None:
        self.flow.write_paused = False
        self.reads.set()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_deltas_are_written_at_once_and_joined_for_a_slow_client() -> None:
    async def main() -> None:
        client = Client()
        await settle()
        client.deltas.put(delta("a"))
        assert client.written == [("now", b"1\r\na\r\n")], "no task has run"
        client.deltas.put(delta(""))
        client.stop()
        for text in "bcd":
            client.deltas.put(delta(text))
            await settle()
        client.go_on()
        client.deltas.put(delta("e"))
        assert len(client.written) == 1, "what waits comes before what is new"
        await settle()
        client.deltas.put(delta("f"))
        client.deltas.put(delta("g", finish_reason="length"))
        await client.task
        ways = [("send", b"b"), ("send", b"cde"), ("now", b"1\r\nf\r\n"), ("now", b"1\r\ng\r\n"), ("send", b"end")]
        assert client.written[1:] == ways and client.deltas.write_now is None

    run(main())


def test_what_fails_in_a_delta_fails_its_own_stream() -> None:
    async def main() -> None:
        client = Client()
        await settle()
        client.cycle.disconnected = True
        client.deltas.put(delta("a"))
        assert not client.written, "the client has gone"
        client.gain = lambda delta: b"%d" % (1 // 0)
        client.deltas.put(delta("b"))
        with pytest.raises(ZeroDivisionError):
            await client.task

    run(main())


def test_a_server_writes_tokens_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = BodyWriter.write, list[bytes]()

    def note(writer: BodyWriter, data: bytes) -> None:
        written.append(data)
        write(writer, data)

    monkeypatch.setattr(BodyWriter, "write", note)
    assert token_ids(asyncio.run(fetch(address(served), 3))) == expected(served.llm, 4)[3]
    assert written, "all deltas have gone through the task"


def test_first_tokens_are_handed_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    steps: list[list[str]] = [[]]
    put = DeltaStream.put

    def note(stream: DeltaStream, delta: Delta) -> None:
        steps[-1].append(delta.request_id)
        put(stream, delta)

    monkeypatch.setattr(DeltaStream, "put", note)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            served.watchers.append(lambda message: steps.append([]))
            both = [await served.prepare([i], LONG) for i in (1, 2)]
            with llm.engine.turns:  # the engine takes both into one step, whose last row is the later one
                early, late = served.submit(both[0], "early"), served.submit(both[1], "late")
            await anext(late)
            assert steps[0] == ["late", "early"]
            early.close()
            late.close()

    run(main())


def test_an_event_is_one_line_by_any_rule() -> None:
    """str.splitlines, by which httpx and others split, ends a line at U+0085, U+2028 and U+2029, too."""
    data = {"type": "t", "text": "a\x85b\u2028c\u2029d\x0be\x1cf\rg\nhé\u2027"}
    for written in (event(data), *named_events([data])):
        *lines, end = written.decode().split("\n\n")
        assert end == "" and lines[0].splitlines() == lines[0].split("\n")
        assert json.loads(lines[0].split("data: ")[1]) == data
    sliced = b"".join(pieces({"a": Slices(iter([[data], [data]])), "b": Parts([data])})).decode()
    assert sliced.splitlines() == [sliced] and json.loads(sliced) == {"a": [data, data], "b": [data]}
