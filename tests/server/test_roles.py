"""Servers with roles: one computes the prompts of another, and may go away and come back."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from hybridrt.base import circuit
from hybridrt.base.errors import ConfigError, EngineError, TransferError
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.server import roles
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.metrics import Metrics
from hybridrt.server.roles import DecodeRole, PrefillRole, read_short
from hybridrt.transfer import workers
from hybridrt.transfer.ranks import Reader
from hybridrt.transfer.reader import LocalReader
from hybridrt.transfer.side import WorkerSide
from tests.support.http_server import WAIT, Served, serving
from tests.support.in_process import InProcessTransport
from tests.support.routing import failing

KEYS = {"fleet_key": "f" * 32, "transfer_key": "t" * 32}
BODY = {"model": "tested", "max_tokens": 6, "temperature": 0}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Arenas of this process instead of NIXL's."""
    arenas: dict[str, torch.Tensor] = {}

    def open_ranks(side: WorkerSide, serve: bool, devices: str) -> list[Reader]:
        name = f"arena {len(arenas)} {time.monotonic()}"
        return [LocalReader(InProcessTransport(arenas, name, side.arena), side.layout)]

    monkeypatch.setattr(workers, "open_ranks", open_ranks)
    return arenas


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    path = str(resolve_model_path("embedded"))
    options: dict[str, Any] = {"device": "cpu", "max_running_requests": 4, "max_model_len": 256}
    with ExitStack() as stack:
        made = [stack.enter_context(LLM(path, transfer_bytes=2**24, **options)) for _ in range(2)]
        yield made[0], made[1]


def until(holds: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answer(served: Served, prompt: list[int]) -> list[int]:
    got = served.post("/v1/completions", BODY | {"prompt": prompt, "return_token_ids": True})
    assert got.status_code == 200, got.text
    tokens: list[int] = got.json()["choices"][0]["token_ids"]
    return tokens


def prompts(count: int) -> list[list[int]]:
    return [list(range(20 + i, 90 + 2 * i)) for i in range(count)]


def test_prompts_are_computed_elsewhere_and_here_while_nobody_is_there(
    llms: tuple[LLM, LLM], hub: dict[str, torch.Tensor]
) -> None:
    computing, decoding = llms
    asked = prompts(4)
    with serving(computing, **KEYS) as front:
        expected = [answer(front, prompt) for prompt in asked]
        config = ServerConfig(port=0, role="decode", prefill_urls=(front.url,), **KEYS)
        role = DecodeRole(decoding, config)
        with serving(decoding) as served:
            assert answer(served, asked[0]) == expected[0]
            assert role.worker.counters().computed_here == 1 and not role.worker.counters().workers
            for number, prompt in enumerate(asked[1:3], 1):  # the prefill worker comes, goes, and comes back
                prefill = PrefillRole(computing, ServerConfig(port=0, role="prefill", **KEYS))
                front.service.transfer_port = prefill.port
                until(lambda: role.worker.counters().workers == 1)
                assert answer(served, prompt) == expected[number]
                assert role.worker.counters().fetched == number
                assert answer(front, prompt) == expected[number], "the prefill worker serves HTTP too"
                prefill.close()
                until(lambda: answer(served, asked[3]) == expected[3] and not role.worker.counters().workers)
                decoding.reset_prefix_cache()
            role.close()
            assert answer(served, asked[3]) == expected[3]


def test_a_prefill_server_that_was_stopped_is_left(
    llms: tuple[LLM, LLM], hub: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays open, and nothing is asked of it that it could leave without an answer."""
    computing, decoding = llms
    with serving(computing, **KEYS) as front:
        prefill = PrefillRole(computing, ServerConfig(port=0, role="prefill", **KEYS))
        front.service.transfer_port = prefill.port
        role = DecodeRole(decoding, ServerConfig(port=0, role="decode", prefill_urls=(front.url,), **KEYS))
        until(lambda: role.worker.counters().workers == 1)
        seen = Metrics(front.service.llm, "tested", role.numbers).text().decode()
        assert 'hybridrt:prefill_workers{engine="0",model_name="tested"} 1.0' in seen
        assert 'hybridrt:prompts_fetched_total{engine="0",model_name="tested"} 0.0' in seen
        assert {number.name: number.value for number in prefill.numbers()}["hybridrt:decode_workers"] == 1
        with monkeypatch.context() as stopped:
            stopped.setattr(role, "_address", silent)
            until(lambda: role.worker.counters().workers == 0)
        until(lambda: role.worker.counters().workers == 1)
        role.close()
        prefill.close()


def test_a_prefill_server_that_answers_wrongly_is_put_aside(
    llms: tuple[LLM, LLM],
    hub: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over its channel, or where it says how to reach it. After a pause it is asked again."""
    monkeypatch.setattr(circuit, "PAUSES", (0.01, 0.02, 0.03))
    computing, decoding = llms
    with serving(computing, **KEYS) as front, serving(decoding) as served:
        prefill = PrefillRole(computing, ServerConfig(port=0, role="prefill", **KEYS))
        front.service.transfer_port = prefill.port
        role = DecodeRole(decoding, ServerConfig(port=0, role="decode", prefill_urls=(front.url,), **KEYS))
        server = role._servers[0]
        until(lambda: role.worker.counters().workers == 1)
        for count_before in (0, 1):
            prefill.worker._peers[0].channel.send(b"no message")
            while server.wrong <= count_before:
                answer(served, prompts(1)[0])  # an idle engine reads no messages
            until(lambda: role.worker.counters().workers == 1)
        fetched = role.worker.counters().fetched
        assert answer(served, prompts(3)[2]) and role.worker.counters().fetched == fetched + 1
        with monkeypatch.context() as garbage:
            garbage.setattr(role, "_address", wrong_address)
            until(lambda: server.wrong >= 3 and role.worker.counters().workers == 0)
        until(lambda: role.worker.counters().workers == 1)
        seen = Metrics(front.service.llm, "tested", role.numbers).text().decode()
        labels = f'engine="0",model_name="tested",url="{front.url}"'
        assert f"hybridrt:prefill_wrong_answers_total{{{labels}}} {server.wrong}.0" in seen
        role.close()
        prefill.close()
    told = [record.getMessage() for record in caplog.records if "put aside" in record.getMessage()]
    assert all(front.url in text for text in told) and "0.01 s" in told[0] and "0.02 s" in told[1]


def test_what_prefill_servers_answer_is_looked_at(llms: tuple[LLM, LLM], hub: dict[str, torch.Tensor]) -> None:
    wrong = (b"", b"[]", b"{}", b'{"port": "1"}', b'{"port": 99999}', b"[" * 4000, b"x" * 5000, b"\xff\x00")
    for body in wrong:
        with failing(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body), fleet=True) as url:
            role = DecodeRole(llms[1], ServerConfig(port=0, role="decode", prefill_urls=(url,), **KEYS))
            (server,) = role._servers
            until(lambda server=server: server.wrong == 1)
            role.close()


def wrong_address(url: str) -> tuple[str, int]:
    raise TransferError(f"/fleet/transfer of {url} answers garbage")


def silent(url: str) -> tuple[str, int]:
    raise httpx.ReadTimeout(f"{url} says nothing")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"role": "other"}, "role"), ({"role": "decode"}, "needs prefill URLs"),
        ({"prefill_urls": ("http://a",)}, "the role both uses no prefill URLs"),
        ({"role": "prefill", "transfer_key": None}, "transfer key"),
        ({"role": "prefill", "fleet_key": None}, "fleet key"),
        ({"role": "decode", "prefill_urls": ("a:1",)}, "prefill URL"),
        ({"role": "prefill", "transfer_port": -1}, "port"), ({"transfer_port": 9001}, "only the role prefill uses"),
    ],
)  # fmt: skip
def test_settings_of_roles_that_do_not_go_together(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**{**KEYS, **wrong})


def test_a_server_without_the_role_computes_for_nobody(served: Served, llms: tuple[LLM, LLM], hub: Any) -> None:
    with serving(llms[0], fleet_key=KEYS["fleet_key"]) as other, other.http() as client:
        answer = client.get("/fleet/transfer", headers={"Authorization": f"Bearer {KEYS['fleet_key']}"})
        assert answer.status_code == 404 and "--role prefill" in answer.text


def test_the_thread_for_decode_servers_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step raises: nobody would see that the thread has ended, and no prompt would be computed any more."""
    monkeypatch.setattr(roles, "CHECK_SECONDS", 0.001)
    role, steps = object.__new__(PrefillRole), count()

    def step() -> bool:
        if (number := next(steps)) == 3:
            role._end.set()
        raise MemoryError if number % 2 else EngineError("failed")

    engine = SimpleNamespace(turns=nullcontext())
    role._llm, role._end, role.worker = SimpleNamespace(engine=engine), threading.Event(), SimpleNamespace(step=step)  # type: ignore[assignment]
    role._run()
    assert next(steps) == 4


def test_an_answer_without_an_end_is_left() -> None:
    sent = count()
    endless = (b"x" * 1000 for _ in sent)
    with pytest.raises(TransferError, match="more than 4096 bytes"):
        read_short(httpx.Response(200, content=endless))
    assert next(sent) == 5
