"""The router in front of real servers of the built-in model, and of replicas that fail."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from hybridrt.base import circuit
from hybridrt.base.errors import ConfigError, UnavailableError
from hybridrt.engine.api.llm import LLM
from hybridrt.fleet import router as router_module
from hybridrt.fleet import sender
from hybridrt.fleet.fleet_metrics import RouterMetrics, merged
from hybridrt.fleet.prefix_mirror import PrefixMirror
from hybridrt.fleet.replica_client import Exchange, ReplicaClient
from hybridrt.fleet.router import Router, RouterConfig
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.respond import ELSEWHERE
from tests.support.http_server import WAIT, Served, serving
from tests.support.one_layer import write_first_layer
from tests.support.routing import FLEET_KEY, Routed, failing, routing

BODY = {"model": "tested", "prompt": "def read_lines(path):", "max_tokens": 12, "temperature": 0}
KEY = {"Authorization": "Bearer client-key"}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_first_layer(tmp_path_factory.mktemp("router") / "embedded")
    with LLM(str(path), device="cpu", max_running_requests=8, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def replica(embedded: LLM) -> Iterator[Served]:
    with serving(embedded, fleet_key=FLEET_KEY, api_keys=("client-key",)) as served:
        yield served


@pytest.fixture(scope="module")
def routed(replica: Served) -> Iterator[Routed]:
    tokenizer = str(resolve_model_path("embedded"))
    with routing(replica.url, tokenizer=tokenizer, api_keys=("client-key",)) as router:
        router.wait_for(1)
        router.wait_for_caches()
        yield router


def test_answers_are_those_of_the_replica(routed: Routed, replica: Served) -> None:
    own, through = replica.post("/v1/completions", BODY, headers=KEY), routed.post("/v1/completions", BODY, headers=KEY)
    assert through.status_code == 200
    assert through.json()["choices"] == own.json()["choices"]
    with (
        routed.http() as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=KEY) as r,
    ):
        text = r.read().decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == own.json()["choices"][0]["text"]
    assert text.endswith("data: [DONE]\n\n") and ": tokens" not in text


def test_the_replica_says_what_is_wrong(routed: Routed) -> None:
    answer = routed.post("/v1/completions", BODY | {"max_tokens": -1}, headers=KEY)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert routed.post("/v1/completions", BODY).status_code == 401
    assert routed.post("/v1/nothing", BODY, headers=KEY).status_code == 404


def test_text_and_conversations_are_known_by_their_tokens(routed: Routed, replica: Served) -> None:
    """The router finds in its mirror what the replica then hits."""
    prefix = routed.router.metrics.prefix_tokens
    prompt = "def parse(text):\n    return [line.split(',') for line in text.splitlines() if line and line[0] != '#']\n"
    for _ in range(2):
        routed.post("/v1/completions", BODY | {"prompt": prompt}, headers=KEY)
        Routed.wait_until(lambda: not replica.llm.engine.has_unfinished())
    mirror = routed.router.replicas[0].placed.mirror
    assert mirror is not None
    present = PrefixMirror(mirror.layout)
    present.update(replica.llm.cache_events(limit=4096).read())
    Routed.wait_until(lambda: len(mirror) == len(present) > 0)
    before = prefix._value.get()
    usage = routed.post("/v1/completions", BODY | {"prompt": prompt}, headers=KEY).json()["usage"]
    assert prefix._value.get() - before == usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_metrics_of_all_and_the_state_of_replicas(routed: Routed, replica: Served) -> None:
    with routed.http() as client:
        text = client.get("/metrics", headers=KEY).text
        facts = client.get("/fleet/replicas", headers={"Authorization": f"Bearer {FLEET_KEY}"}).json()
        assert client.get("/fleet/replicas", headers=KEY).status_code == 401
        assert client.get("/fleet/cache_events", headers={"Authorization": f"Bearer {FLEET_KEY}"}).status_code == 404
    assert f'replica="{replica.url}"' in text and "hybridrt_router_requests_total" in text
    assert [fact["url"] for fact in facts] == [replica.url] and facts[0]["ready"]


def test_replicas_that_have_gone_share_a_series() -> None:
    """What runs at one may end wrongly afterwards."""
    metrics = RouterMetrics()
    for url in ("http://a", "http://b"):
        metrics.add(url)
        metrics.count(url, 5, 0, 0)
        metrics.count_wrong(url, "form")
        metrics.forget(url)
        metrics.count_wrong(url, "form")
    metrics.add("http://a")
    metrics.count("http://a", 5, 0, 0)
    samples = [line for line in metrics.text([]).splitlines() if "{" in line and "_created" not in line]
    assert sorted(samples) == [
        'hybridrt_router_requests_total{replica="gone"} 2.0',
        'hybridrt_router_requests_total{replica="http://a"} 1.0',
        'hybridrt_router_wrong_answers_total{reason="form",replica="gone"} 4.0',
    ]


def test_what_runs_at_a_replica_that_has_gone_is_watched() -> None:
    """It may have left a list of addresses because its host is off: nobody else ends the requests there."""

    async def run() -> None:
        router = Router(RouterConfig(ServerConfig(), (), changing=True))
        with socket.socket() as nobody:  # bound, and nobody listens
            nobody.bind(("127.0.0.1", 0))
            router.replace([f"http://127.0.0.1:{nobody.getsockname()[1]}"])
            task = asyncio.create_task(asyncio.sleep(3600))
            exchange = Exchange(task)
            task.add_done_callback(lambda _: replica.exchanges.discard(exchange))
            (replica,) = router.replicas
            replica.exchanges.add(exchange)
            router.replace([])
            assert not router.replicas and len(router._leaving) == 1
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, WAIT)
            assert task.cancelled()
            await asyncio.wait_for(asyncio.gather(*router._leaving), WAIT)
            await asyncio.sleep(0)
            assert not router._leaving and asyncio.all_tasks() == {asyncio.current_task()}
            await router.close()

    asyncio.run(run())


def test_merged_metrics_have_one_head_and_a_label_each() -> None:
    text = '# HELP a says what\n# TYPE a gauge\na{b="c"} 1\na 2.5\nwrong line here\n'
    assert merged({"http://x": text, "http://y": text}).splitlines() == [
        "# HELP a says what", "# TYPE a gauge", 'a{replica="http://x",b="c"} 1', 'a{replica="http://x"} 2.5',
        'a{replica="http://y",b="c"} 1', 'a{replica="http://y"} 2.5',
    ]  # fmt: skip


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ncontent-length: 9999\r\n\r\n"
CHUNK = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'


@pytest.mark.parametrize(
    "answers",
    [(), (STREAM,), (STREAM, CHUNK), (b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\n{}",), (b"no http\r\n\r\n",)],
)
def test_a_request_of_which_nothing_was_sent_goes_elsewhere(replica: Served, answers: tuple[bytes, ...]) -> None:
    with failing(*answers) as bad, routing(bad, replica.url) as router:
        router.wait_for(2)
        for stream in (False, True):
            for _ in range(2):  # one of them begins at the failing one
                text = router.post("/v1/completions", BODY | {"stream": stream}, headers=KEY).text
                assert '"text"' in text and "error" not in text
        assert router.router.metrics.retries._value.get() >= 1
        Routed.wait_until(lambda: all(not r.placed.requests and not r.placed.tokens for r in router.router.replicas))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_stream_that_is_cut_says_where_to_resume(path: str) -> None:
    with failing(STREAM, CHUNK + b": tokens 1\n\n" + CHUNK + b": tokens 3\n\n") as bad, routing(bad) as router:
        router.wait_for(1)
        text = router.post(path, BODY | {"stream": True}).text
        *_, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert last["error"]["resume_from"] == 3 and text.count('"text":"x"') == 2 and ": tokens" not in text
        assert path == "/v1/messages" or last["error"]["code"] == "stream_cut"
        Routed.wait_until(lambda: router.router.metrics.cut._value.get() == 1)


def test_a_request_that_ends_its_replicas_is_tried_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition is tried on one. What has ended well since is no suspect."""
    with failing() as a, failing() as b, failing() as c, failing() as d, routing(a, b, c, d) as router:
        router.wait_for(4)
        for asked in (2, 3):
            answer = router.post("/v1/completions", BODY)
            assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
            assert sum(router.router.metrics.requests.labels(url)._value.get() for url in (a, b, c, d)) == asked


def test_a_request_that_has_ended_is_no_suspect(replica: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit, "PAUSES", (0.0,))
    with failing() as bad, routing(bad, replica.url) as router:
        router.wait_for(2)
        for _ in range(5):
            assert router.post("/v1/completions", BODY, headers=KEY).status_code == 200
        assert router.router.metrics.retries._value.get() >= 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_is_cut_goes_on_elsewhere(path: str, replica: Served) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 24}
    whole = replica.post(path, body, headers=KEY | {"x-hybridrt-count": "1"}).text
    cut = whole.index(": tokens 4")
    cut = whole.index("\n\n", cut) + 2
    with (
        failing(STREAM, whole[: cut + 20].encode()) as bad,
        routing(bad, replica.url, resume=True, api_keys=("client-key",)) as router,
    ):
        router.wait_for(2)
        for _ in range(2):
            assert said(router.post(path, body, headers=KEY).text) == said(whole)
        assert router.router.metrics.resumed._value.get() == 1 and router.router.metrics.cut._value.get() == 0
    with failing(STREAM, whole[:cut].encode()) as bad, routing(bad) as router:
        router.wait_for(1)
        last = json.loads(router.post(path, body).text.split("data: ")[-2])
        ids = last["error"]["resume_token_ids"]
        assert last["error"]["code"] == "stream_cut" and last["error"]["resume_from"] == len(ids) == 4
    rest = replica.post(path, body | {"resume_token_ids": ids}, headers=KEY).text
    assert said(whole[:cut]) + said(rest) == said(whole)


@pytest.mark.parametrize("resume", [False, True])
def test_a_stream_whose_replica_cannot_go_on(resume: bool, replica: Served) -> None:
    body = BODY | {"stream": True, "max_tokens": 24}
    whole = replica.post("/v1/completions", body, headers=KEY | {"x-hybridrt-count": "1"}).text
    cut = whole[: whole.index("\n\n", whole.index(": tokens 4")) + 2].encode()
    end = ELSEWHERE + b'data: {"error":{"code":"unavailable"}}\n\ndata: [DONE]\n\n'
    with failing(STREAM, cut + end[:5], end[5:]) as bad, routing(bad, replica.url, resume=resume) as router:
        router.wait_for(2)
        texts = [router.post("/v1/completions", body, headers=KEY).text for _ in range(2)]  # one begins at each
        assert "unavailable" not in "".join(texts) and "elsewhere" not in "".join(texts)
        assert sorted("stream_cut" in text for text in texts) == [False, not resume]
        assert all(said(text) == said(whole) for text in texts if "stream_cut" not in text)
        assert router.router.metrics.resumed._value.get() == resume


def test_a_stream_outlives_several_replicas_that_shut_down(embedded: LLM, replica: Served) -> None:
    """The request is not the reason, however often it is cut."""
    body = BODY | {"stream": True, "max_tokens": 230, "ignore_eos": True}
    whole = replica.post("/v1/completions", body, headers=KEY).text
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        servers = {s.url: s for s in (stack.enter_context(serving(embedded, fleet_key=FLEET_KEY)) for _ in range(3))}
        router = stack.enter_context(routing(*servers, resume=True))
        router.wait_for(3)
        asked = pool.submit(router.post, "/v1/completions", body)
        for _ in range(2):
            found = list[ReplicaClient]()
            while not found:
                time.sleep(0.001)
                # A copy: the router's thread changes the set.
                found = [r for r in router.router.replicas if r.ready and any(e.begun for e in list(r.exchanges))]
                assert not asked.done()
            servers[found[0].url].service.ready = found[0].ready = False
            servers[found[0].url].service.llm.abort_all(UnavailableError("it shuts down"))
        assert said(asked.result().text) == said(whole)
        assert router.router.metrics.resumed._value.get() == 2


def test_a_stream_does_not_go_on_with_another_model(replica: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "READY_SECONDS", 0.1)
    monkeypatch.setattr(circuit, "PAUSES", (0.0,))
    body = BODY | {"stream": True, "max_tokens": 24}
    whole = replica.post("/v1/completions", body, headers=KEY | {"x-hybridrt-count": "1"}).text
    cut = whole[: whole.index("\n\n", whole.index(": tokens 4")) + 2]
    with failing(STREAM, cut.encode()) as bad, routing(bad, replica.url, resume=True) as router:
        router.wait_for(2)
        router.wait_until(lambda: router.router.replicas[1].placed.mirror is not None)
        first, second = router.router.replicas
        for ours, theirs, goes_on in (("a", "b", False), ("a", "", False), ("a", "a", True), ("", "b", True)):
            first.model, second.model = ours, theirs
            texts = [router.post("/v1/completions", body, headers=KEY).text for _ in range(2)]  # one begins at each
            assert [text.count("stream_cut") for text in sorted(texts, key=len)].count(0) == 1 + goes_on
            assert all(said(text) == said(whole) for text in texts if "stream_cut" not in text)


def test_models_that_differ_are_told(embedded: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(embedded, fleet_key=FLEET_KEY) as one,
        serving(embedded, fleet_key=FLEET_KEY) as other,
    ):
        one.service.model, other.service.model = "a" * 32, "b" * 32
        with routing(one.url, other.url) as router:
            router.wait_for_caches()
            with router.http() as client:
                facts = client.get("/fleet/replicas", headers={"Authorization": f"Bearer {FLEET_KEY}"}).json()
    assert [fact["model"] for fact in facts] == ["a" * 32, "b" * 32]
    (told,) = [record.getMessage() for record in caplog.records if "another model" in record.getMessage()]
    assert one.url in told and other.url in told


def test_why_a_replica_is_not_ready_is_told(replica: Served, caplog: pytest.LogCaptureFixture) -> None:
    urls = (replica.url + "/v1", "http://127.0.0.1:9")
    with routing(*urls) as router, router.http() as client:
        facts = client.get("/fleet/replicas", headers={"Authorization": f"Bearer {FLEET_KEY}"}).json()
    assert "401" in facts[0]["problem"] and "/v1" in facts[0]["problem"] and "no answer" in facts[1]["problem"]
    said_of = [record.getMessage() for record in caplog.records if "is not ready" in record.getMessage()]
    assert len(said_of) == 2 and all(url in text for url, text in zip(urls, said_of, strict=True))


def said(text: str) -> str:
    """The text of a stream that ends as it should."""
    choices = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def test_without_a_replica_that_takes_it_the_last_refusal_is_the_answer(
    replica: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = b"HTTP/1.1 429 Full\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\n{}"
    with failing(refusal) as bad, routing(bad) as router:
        router.wait_for(1)
        answer = router.post("/v1/completions", BODY)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
    monkeypatch.setattr(sender, "READY_SECONDS", 0.1)
    with routing("http://127.0.0.1:9") as router:
        assert router.post("/v1/completions", BODY).status_code == 503
        with router.http() as client:
            assert client.get("/health").status_code == 200 and client.get("/ready").status_code == 503


def test_a_request_waits_for_the_only_replica(replica: Served) -> None:
    with routing(replica.url) as router:
        router.wait_for(1)
        router.router.replicas[0].ready = False  # until the next answer
        assert router.post("/v1/completions", BODY, headers=KEY).status_code == 200


def test_a_drained_replica_gets_no_more(replica: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "READY_SECONDS", 0.1)
    fleet = {"Authorization": f"Bearer {FLEET_KEY}"}
    with routing(replica.url) as router:
        router.wait_for(1)
        for drained, status in ((True, 503), (False, 200)):
            told = router.post("/fleet/drain", {"url": replica.url, "drained": drained}, headers=fleet)
            assert told.json()["drained"] is drained
            assert router.post("/v1/completions", BODY, headers=KEY).status_code == status
        assert router.post("/fleet/drain", {"url": replica.url + "/"}, headers=fleet).json()["drained"] is True
        assert router.post("/fleet/drain", {"url": "http://other"}, headers=fleet).status_code == 400
        wrong = router.post("/fleet/drain", {"url": replica.url, "drain": False}, headers=fleet)
        assert wrong.status_code == 400 and "'drain'" in wrong.json()["error"]["message"]
        assert router.post("/fleet/drain", {"url": replica.url}).status_code == 401


def test_a_key_for_replicas_replaces_the_clients(replica: Served) -> None:
    with routing(replica.url, replica_key="client-key", api_keys=("outside",)) as router:
        router.wait_for(1)
        assert router.post("/v1/completions", BODY, headers={"x-api-key": "outside"}).status_code == 200
        assert router.post("/v1/completions", BODY, headers=KEY).status_code == 401


@pytest.mark.parametrize(
    "replicas",
    [
        (), ("127.0.0.1:8000",), ("http://a:b@c",), ("ftp://a",), ("http://a", "http://a/"), ("http://a?b",),
        ("http://a:99999",), ("http://a:x",), ("http://[::1",), (f"http://{'a' * 70}.org",), ("http://a\n",),
    ],
)  # fmt: skip
def test_wrong_replicas(replicas: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="replica"):
        RouterConfig(ServerConfig(), replicas)
    if len(replicas) == 1:
        with pytest.raises(ConfigError, match="replica"):
            RouterConfig(ServerConfig(), (), discover=replicas[0])


def test_a_path_that_no_request_can_have_is_refused(routed: Routed) -> None:
    """A quote is three characters at the replica."""
    connection = http.client.HTTPConnection(*routed.url.removeprefix("http://").split(":"), timeout=30)
    for path in ("/v1/models/", "/v1/responses/"):
        connection.request("GET", path + '"' * 25_000, headers=KEY)
        answer = connection.getresponse()
        assert answer.status == 414 and b"too long" in answer.read()
    connection.close()


def test_headers_may_have_bytes_beyond_ascii_and_blanks(routed: Routed) -> None:
    connection = http.client.HTTPConnection(*routed.url.removeprefix("http://").split(":"), timeout=30)
    for value in ("\xe9", "x \t", ""):
        headers = KEY | {"Content-Type": "application/json", "Accept": value, "traceparent": value}
        connection.request("POST", "/v1/completions", json.dumps(BODY | {"max_tokens": 1}), headers)
        answer = connection.getresponse()
        assert (answer.status, b"choices" in answer.read()) == (200, True), value
    connection.close()


def test_odd_bodies_have_no_names_and_reach_the_replica(routed: Routed) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": 5}], "tools": [{}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"a": []}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template": 5}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": 5}]}]}),
        ("/v1/completions", {"prompt": [[5, "x", None]]}),
        ("/v1/completions", {"prompt": {"a": 1}}),
    ):
        assert routed.post(path, {"model": "tested", "max_tokens": 1, **body}, headers=KEY).status_code == 400, body


def test_bodies_are_bounded(replica: Served) -> None:
    body: dict[str, Any] = BODY | {"prompt": "x" * 5000}
    with routing(replica.url, max_body_bytes=1000) as router:
        assert router.post("/v1/completions", body, headers=KEY).status_code == 413


def test_replicas_that_dns_names_come_and_go(replica: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "FIND_SECONDS", 0.05)
    monkeypatch.setattr(sender, "READY_SECONDS", 0.1)
    port = replica.url.rpartition(":")[2]
    with routing(discover=f"http://localhost:{port}") as router:
        router.wait_for(1)
        assert router.post("/v1/completions", BODY, headers=KEY).status_code == 200
        assert "replica_ready{" in router.router.metrics.text(router.router.replicas)

        async def nowhere(*arguments: Any, **named: Any) -> list[Any]:
            return []

        with monkeypatch.context() as patched:
            patched.setattr("uvloop.Loop.getaddrinfo", nowhere, raising=True)
            Routed.wait_until(lambda: not router.router.replicas)
            assert "replica_ready{" not in router.router.metrics.text([]), "it is there no more"
            shown = router.router.metrics.text([])
            assert 'router_requests_total{replica="gone"} 1.0' in shown and shown.count("_requests_total{") == 1
            assert router.post("/v1/completions", BODY, headers=KEY).status_code == 503
        router.wait_for(1)
