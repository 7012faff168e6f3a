"""benchmarks.attacks at a small scale: the attacker keeps its bounds, the neighbour is timed. How long that takes is
for the documents."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attack_clients, attacks
from benchmarks.attack_cases import COUNTER, Attack, cases, read_cases, request
from benchmarks.attack_clients import STREAM_TOKENS, Neighbour, attack
from benchmarks.attack_images import cases_of_images, small_picture
from benchmarks.seeing_model import write_seeing_model
from hybridrt.engine.api.llm import LLM
from hybridrt.runtime.load.model_path import resolve_model_path
from tests.support.http_server import Served, serving

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model = str(resolve_model_path("embedded"))
    with LLM(model, device="cpu", max_running_requests=4, max_model_len=64) as llm, serving(llm) as served:
        yield served
        served.wait_until_idle()


def address(served: Served) -> tuple[str, int]:
    host, port = served.url.removeprefix("http://").split(":")
    return host, int(port)


def test_cases_are_whole_requests_of_bounded_size() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found) > 10
    for case in found:
        assert 1 <= case.connections <= 10 and all(len(part) < 20_000_000 for part in case.parts)
        if case.waits:
            head, body = case.parts[0].split(b"\r\n\r\n", 1)
            assert b"Connection: close" in head and f"Content-Length: {len(body)}".encode() in head
            assert json.loads(body)


@pytest.mark.soak
def test_images_are_encoded_or_refused(tmp_path: Path) -> None:
    """The picture is another one with another number."""
    images = {case.name: case for case in cases_of_images()}
    assert all(case.sees and len(case.parts[0]) < 16 << 20 for case in images.values())
    model = str(write_seeing_model(tmp_path))
    options: dict[str, Any] = {"load_format": "dummy", "max_running_requests": 2, "encoder_cache_tokens": 8192}
    with (
        LLM(model, device="cpu", **options) as llm,
        serving(llm, chat_template=None) as served,
        served.http() as client,
    ):
        for name, status, encoded in (("many-images", 200, 100), ("bombs", 400, 100), ("new-images", 200, 101)):
            body = images[name].parts[0].partition(b"\r\n\r\n")[2].replace(COUNTER, b"12345678")
            answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            assert (answer.status_code, llm.engine.counters().encoded_spans) == (status, encoded), answer.text
        neighbour = Neighbour(address(served), small_picture())
        neighbour._see()
        assert llm.engine.counters().encoded_spans == 102 and len(neighbour.times["picture"]) == 1
        body = images["new-images"].parts[0].partition(b"\r\n\r\n")[2].replace(COUNTER, b"12345679")
        client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert llm.engine.counters().encoded_spans == 103
        served.wait_until_idle()


def test_the_attacker_has_bounds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """In requests and in CPU time, whether it waits for answers or not."""
    monkeypatch.setattr(attack_clients, "MAX_SENT", 6)
    for case in (
        Attack("waits", (request("/tokenize", {"prompt": "a"}),), 2),
        Attack("does not wait", (GET * 10,), 2, waits=False),
        Attack("is refused", (b"GET / HTTP/1.1\r\n\r\n",), waits=False),
    ):
        got = attack(case, address(served), 60.0, 1.0)
        assert 6 <= got["sent"] <= 7
    began = time.process_time()
    monkeypatch.setattr(attack_clients, "MAX_SENT", 10**9)
    attack(Attack("closed port", (GET,), waits=False), ("127.0.0.1", 9), 0.5, 0.2)
    assert time.process_time() - began < 0.4


def test_each_request_can_have_another_number(served: Served) -> None:
    connection = attack_clients._Connection(address(served), b"<%b>" % COUNTER, True)
    sent = set()
    for _ in range(3):
        connection._begin()
        sent.add(bytes(connection._left))
        time.sleep(0.001)
    assert len(sent) == 3 and all(len(text) == len(COUNTER) + 2 for text in sent)


def test_the_neighbour_times_what_clients_see(served: Served) -> None:
    neighbour = Neighbour(address(served))
    neighbour.run(0.01)
    assert not neighbour.failures, neighbour.failures
    counts = {name: len(times) for name, times in neighbour.times.items()}
    assert counts.pop("between tokens") <= STREAM_TOKENS - 1
    assert counts == {"first token": 1, "chat": 1, "new form": 1}
    gone = Neighbour(("127.0.0.1", 9), small_picture())
    gone.run(0.01)
    assert len(gone.failures) == 4 and not gone.times


def test_the_table_has_each_measure() -> None:
    rows = attacks.compare({"chat": [0.1] * 9, "first token": [0.2]}, {"chat": [0.3] * 9})
    assert rows["chat"]["ratio"] == pytest.approx(3) and rows["first token"]["ratio"] == float("inf")


def test_cases_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "more.json"
    entries = [
        {"name": "mine", "path": "/tokenize", "body": {"prompt": "x"}, "connections": 3},
        {"name": "raw", "raw": "GET / HTTP/1.1\r\n\r\n", "times": 5},
    ]
    file.write_text(json.dumps(entries))
    mine, raw = read_cases(str(file))
    assert (mine.connections, mine.waits, mine.parts) == (3, True, (request("/tokenize", {"prompt": "x"}),))
    assert (raw.waits, raw.parts[0].count(b"GET")) == (False, 5)
    file.write_text('[{"name": "neither"}]')
    with pytest.raises(ValueError, match="needs path and body"):
        read_cases(str(file))
    for wrong in (["--attack", "unknown"], ["--seconds", "0"], ["--share", "2"]):
        with pytest.raises(SystemExit):
            attacks.main(wrong)


@pytest.mark.slow
def test_a_case_against_a_server_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--serve-option=--max-running-requests=4", "--serve-option=--max-model-len=64"]
    (result,) = attacks.main(["--attack", "pipeline", "--seconds", "1", "--output", str(output), *options])
    assert not result["failed"] and result["attacker"]["sent"] > 0 and result["server_peak_mib"] > 50
    assert set(result["times"]) == {"first token", "between tokens", "chat", "new form"}
    assert json.loads(output.read_text())[0]["attack"] == "pipeline"
