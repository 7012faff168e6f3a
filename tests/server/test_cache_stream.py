"""The events of the prefix cache over HTTP: a router's mirror knows what the server has cached."""

import time
from collections.abc import Iterator

import httpx
import pytest

from hybridrt.engine.api.llm import LLM
from hybridrt.fleet.cache_messages import apply_message, read_layout
from hybridrt.fleet.prefix_mirror import PrefixMirror, names_of
from hybridrt.server import cache_stream
from tests.support.http_server import WAIT, Served, serving

KEY = "k" * 32
HEADERS = {"Authorization": f"Bearer {KEY}"}
PROMPT = list(range(10, 90))


@pytest.fixture(scope="module")
def replica(embedded: LLM) -> Iterator[Served]:
    with serving(embedded, fleet_key=KEY, api_keys=("client-key",), request_timeout=0.5) as served:
        yield served


def ask(replica: Served, prompt: list[int]) -> int:
    body = {"model": "tested", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = replica.post("/v1/completions", body, headers={"Authorization": "Bearer client-key"}).json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


class Reader:
    """A mirror that follows the stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        assert next(self._lines) == "event: layout"
        self.mirror = PrefixMirror(read_layout(next(self._lines).removeprefix("data: ").encode()))
        self.ids = list[int]()

    def until(self, prompt: list[int], length: int) -> None:
        deadline = time.monotonic() + 20
        while self.mirror.match(names_of(prompt)) != length:
            assert time.monotonic() < deadline, self.mirror.match(names_of(prompt))
            self.step()

    def step(self) -> None:
        line = next(self._lines)
        if line.startswith("id: "):
            self.ids.append(int(line[4:]))
        elif line.startswith("data: "):
            apply_message(line[6:].encode(), self.mirror)


def test_a_reader_knows_what_a_prompt_will_hit(replica: Served) -> None:
    replica.llm.reset_prefix_cache()
    with replica.http() as client, client.stream("GET", "/fleet/cache_events", headers=HEADERS) as response:
        reader = Reader(response)
        assert ask(replica, PROMPT) == 0
        reader.until([*PROMPT, 1], 64)
        assert ask(replica, [*PROMPT, 1]) == 64
        with client.stream("GET", "/fleet/cache_events", headers=HEADERS) as second:
            late = Reader(second)
            late.until([*PROMPT, 1], 80)
        assert reader.ids == list(range(len(reader.ids)))
        replica.llm.reset_prefix_cache()
        reader.until([*PROMPT, 1], 0)
        deadline = time.monotonic() + 1.5  # longer than a request may take
        while time.monotonic() < deadline:
            reader.step()
    while replica.service.cache_readers:
        assert time.monotonic() < deadline + WAIT
        time.sleep(0.01)


def test_a_reader_that_missed_events_gets_all_contents_anew(replica: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_stream, "HELD", 1)
    monkeypatch.setattr(cache_stream, "READ_SECONDS", 0.3)
    replica.llm.reset_prefix_cache()
    with replica.http() as client, client.stream("GET", "/fleet/cache_events", headers=HEADERS) as response:
        reader = Reader(response)
        for first in range(20, 24):
            ask(replica, [first, *PROMPT])
        for first in range(20, 24):
            reader.until([first, *PROMPT, 1], 80)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer client-key"}])
def test_only_the_fleet_key_opens_the_stream(replica: Served, headers: dict[str, str]) -> None:
    with replica.http() as client:
        assert client.get("/fleet/cache_events", headers=headers).status_code == 401
        assert client.get("/v1/models", headers=HEADERS).status_code == 401


def test_without_a_fleet_key_there_is_no_stream(served: Served) -> None:
    with served.http() as client:
        assert client.get("/fleet/cache_events").status_code == 404


def test_readers_are_few(replica: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_stream, "MAX_READERS", 0)
    with replica.http() as client:
        assert client.get("/fleet/cache_events", headers=HEADERS).status_code == 429
