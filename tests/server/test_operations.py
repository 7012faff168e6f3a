"""Endpoints that do not generate; logs; statistics; metrics."""

import json
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hybridrt
from hybridrt import LLM
from hybridrt.base.errors import ConfigError, UnavailableError
from hybridrt.chat.conversation import read_conversation
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.run import Statistics
from tests.support.http_server import Served, serving

COMPLETION = {"model": "tested", "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}


def metrics(served: Served) -> dict[str, float]:
    with served.http() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason") or sample.labels.get("le") or sample.labels.get("rank")
            found[sample.name + (f"[{reason}]" if reason else "")] = sample.value
            if sample.name.startswith(("vllm:", "hybridrt:")):
                assert sample.labels["model_name"] == "tested"
    return found


def test_probes_version_and_load(served: Served) -> None:
    with served.http() as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        assert {client.head(path).status_code for path in ("/health", "/ready", "/metrics")} == {200}
        assert client.get("/metrics").headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert client.get("/version").json() == {"version": hybridrt.__version__}
        assert client.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
        assert "/v1/completions" in client.get("/openapi.json").json()["paths"]


def test_tokenize_and_detokenize(served: Served) -> None:
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    text = "def f():\n    return 'é'"
    got = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert got["tokens"] == tokenizer.encode(text) and got["count"] == len(got["tokens"])
    assert got["max_model_len"] == 256 and len(got["token_strs"]) == got["count"]
    assert served.post("/detokenize", {"tokens": got["tokens"]}).json() == {"prompt": text}
    special = tokenizer.hf.convert_ids_to_tokens(0)
    assert served.post("/detokenize", {"tokens": [0, *got["tokens"]]}).json() == {"prompt": special + text}
    messages = [{"role": "user", "content": "Hi"}]
    rendered = served.service.chat.render(read_conversation(messages))
    assert served.post("/tokenize", {"messages": messages}).json()["tokens"] == tokenizer.encode_bare(rendered)
    bare = served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert bare == tokenizer.encode_bare(text)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user"}]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "judge"}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "5"}, "tokens"),
        ("/abort", {"request_id": 5}, "request_id"),
    ],
)
def test_what_they_refuse(path: str, body: Any, field: str | None, served: Served) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_abort_ends_a_request_by_its_id(stream: bool, served: Served) -> None:
    """Both names end it: the id of the answer, and what the request called itself."""
    for name in ("cmpl-long", "long"):
        body = COMPLETION | {"max_tokens": 250, "n": 8, "request_id": "long", "stream": stream}
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda body=body, into=answers: into.append(served.post("/v1/completions", body))
        )
        with served.llm.engine.turns:
            thread.start()
            while not served.service.llm.unfinished:
                pass
            assert served.post("/abort", {"request_id": name}).json() == {"aborted": True}
            assert served.post("/v1/completions", body).status_code == 400, "the id is taken"
        thread.join()
        assert answers[0].status_code == 200 and answers[0].text.count('"finish_reason":"abort"') == 8
        assert served.post("/abort", {"request_id": name}).json() == {"aborted": False}


def test_metrics_of_experts_on_several_ranks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("expert" in name for name in metrics(served))
    monkeypatch.setattr(LLM, "expert_tokens", lambda llm: [[30, 10], [20, 20], [0, 0]])
    found = {name: value for name, value in metrics(served).items() if "expert" in name}
    tokens = {"hybridrt:expert_tokens_total[0]": 50.0, "hybridrt:expert_tokens_total[1]": 30.0}
    assert found == tokens | {"hybridrt:expert_imbalance": 1.25}


def test_metrics_count_what_happened(served: Served) -> None:
    before = metrics(served)
    for stream in (False, True):
        served.post("/v1/completions", COMPLETION | {"stream": stream, "n": 2})
    served.wait_until_idle()
    after = metrics(served)
    gained = {name: after[name] - before[name] for name in after}
    for name, value in {
        "vllm:prompt_tokens_total": 4,
        "vllm:generation_tokens_total": 16,
        "vllm:request_success_total[length]": 4,
        "vllm:time_to_first_token_seconds_count": 4,
        "vllm:e2e_request_latency_seconds_count": 4,
        "vllm:inter_token_latency_seconds_count": 12,
        "vllm:request_generation_tokens_bucket[5.0]": 4,
        "vllm:request_generation_tokens_bucket[2.0]": 0,
        "vllm:request_prompt_tokens_sum": 8,
    }.items():
        assert gained[name] == value, name
    assert gained["hybridrt:steps_total"] >= 4 and gained["hybridrt:step_seconds_count"] >= 4
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0 and after["vllm:cache_config_info"] == 1
    free = after["hybridrt:state_slots_free"] + after["hybridrt:state_slots_cached"]
    assert after["hybridrt:state_slots"] == served.llm.plan.num_slots >= free > 0, "cached pages take memory, too"
    assert "process_resident_memory_bytes" in after


def test_cached_prefixes_are_counted_and_reset(served: Served) -> None:
    body = COMPLETION | {"prompt": list(range(5, 105)), "temperature": 0}
    assert served.post("/reset_prefix_cache", {}).json() == {"reset": True}
    before = metrics(served)
    first, again, other = (served.post("/v1/completions", body | {"cache_salt": s}).json() for s in ("a", "a", "b"))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again, other)]
    assert cached[0] == cached[2] == 0 and 64 <= cached[1] < 100
    assert first["choices"] == again["choices"] == other["choices"]
    after = metrics(served)
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == cached[1]
    assert after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] >= 200
    assert served.post("/reset_prefix_cache", {}).json() == {"reset": True}
    assert metrics(served)["hybridrt:state_slots_cached"] == 0


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["a"]])
def test_a_wrong_salt_is_refused_before_anything_changes(salt: object, served: Served) -> None:
    before = metrics(served)["vllm:prefix_cache_queries_total"]
    found = served.post("/v1/completions", COMPLETION | {"cache_salt": salt})
    assert found.status_code == 400 and found.json()["error"]["param"] == "cache_salt", found.text
    assert metrics(served)["vllm:prefix_cache_queries_total"] == before
    assert served.post("/v1/completions", COMPLETION | {"cache_salt": "x" * 256}).status_code == 200


def test_what_has_not_ended_in_time_ends_with_an_error(embedded: LLM) -> None:
    """An answer with the finish reason "abort" would look whole."""
    long = COMPLETION | {"max_tokens": 200, "ignore_eos": True}
    with serving(embedded) as served, ThreadPoolExecutor(3) as pool:
        counted = {"x-hybridrt-count": "1"}
        asked = [
            pool.submit(served.post, "/v1/completions", long | {"stream": stream}, headers=headers)
            for stream, headers in ((False, {}), (True, {}), (True, counted))
        ]
        while served.service.llm.llm.engine.counters().running < 3:
            time.sleep(0.001)
        served.service.llm.abort_all(UnavailableError("it is over"))
        whole, stream, for_router = (each.result() for each in asked)
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "unavailable"
    assert '"code":"unavailable"' in stream.text and "abort" not in stream.text and ": elsewhere" not in stream.text
    assert for_router.text.index(": elsewhere\n\n") < for_router.text.index('"unavailable"')


def test_the_access_log_holds_facts_and_no_secrets(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("hybridrt.access").propagate = True
    with caplog.at_level(logging.INFO, logger="hybridrt.access"), served.http() as client:
        headers = {"authorization": "Bearer secret", "x-request-id": "mine"}
        client.post("/v1/completions?key=secret", json=COMPLETION | {"user": "secret"}, headers=headers)
        assert client.get("/ready").status_code == 200
        client.get("/nowhere%0Asecond-line")
        found: dict[str, Any] = {}
        while not {"mine", None} <= found.keys():  # written once the answer has gone, also those of earlier tests
            time.sleep(0.001)
            lines = [json.loads(record.message) for record in caplog.records]
            found = {line["request_id"] if line["path"] == "/v1/completions" else None: line for line in lines}
    first, second = found["mine"], found[None]
    facts = {"method": "POST", "path": "/v1/completions", "status": 200, "prompt_tokens": 2, "output_tokens": 4}
    assert facts.items() <= first.items() and first["request_id"] == "mine" and first["seconds"] > 0
    assert not any(line["path"] == "/ready" for line in lines), "one each second would hide the others"
    assert second["status"] == 404 and not any("\n" in record.message for record in caplog.records)
    assert "secret" not in caplog.text


def test_statistics_say_what_happened(served: Served) -> None:
    statistics = Statistics(served.service)
    statistics.line()
    assert statistics.line() is None, "nothing has happened since"
    served.post("/v1/completions", COMPLETION)
    served.wait_until_idle()
    line = statistics.line()
    pattern = (
        r"0 running, 0 waiting; prompt [\d.]+ tokens/s, output [\d.]+ tokens/s; KV pages 0.0% used, \d+ of \d+ state"
    )
    assert line is not None and re.match(pattern, line) and "output 0.0" not in line
    assert statistics.line() is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"port": 70000}, "port is 70000"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"request_timeout": float("nan")}, "request_timeout is nan"),
        ({"drain_timeout": -1}, "drain_timeout is -1"),
        ({"tls_key": "key.pem"}, "a certificate and a key"),
        ({"tls_key": "/nowhere", "tls_certificate": "/nowhere"}, "No such file"),
        ({"tls_key": __file__, "tls_certificate": __file__}, "pass PEM files"),
        ({"request_timeout": 0}, "request_timeout is 0; it must be a number of seconds, above 0"),
        ({"step_timeout": 0.0}, "step_timeout is 0.0"),
        ({"allowed_origins": ("",)}, "allowed origin ''"),
        ({"allowed_origins": ("https://a.example/path",)}, "allowed origin"),
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint is 'collector:4318'; it must be a URL"),
        ({"api_keys": ("",)}, "API key"),
        ({"api_keys": ("a b",)}, "API key"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        ServerConfig(**change)
