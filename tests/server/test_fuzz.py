"""Malformed requests of every kind: no 5xx, no hang, nothing left behind."""

import json
import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrt.server.anthropic.message_protocol import CountRequest, MessageRequest
from hybridrt.server.core.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hybridrt.server.openai.response_protocol import ResponseRequest
from tests.server.test_concurrency import address
from tests.support.http_server import Served

FIELDS = {
    "/v1/completions": sorted(CompletionRequest.model_fields),
    "/v1/chat/completions": sorted(ChatRequest.model_fields),
    "/v1/responses": sorted(ResponseRequest.model_fields),
    "/v1/messages": sorted(MessageRequest.model_fields),
    "/v1/messages/count_tokens": sorted(CountRequest.model_fields),
    "/tokenize": sorted(TokenizeRequest.model_fields),
    "/detokenize": sorted(DetokenizeRequest.model_fields),
    "/abort": ["request_id"],
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/abort": {"request_id": "x"},
}
# Pieces of a conversation that are right by themselves, and may be put together in odd orders.
ITEMS: list[Any] = [
    {"role": "user", "content": "x"}, {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}, {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
    {"type": "function_call_output", "call_id": "c", "output": ""},
]  # fmt: skip
BLOCKS: list[Any] = [
    {"type": "text", "text": "x"}, {"type": "thinking", "thinking": "x", "signature": ""},
    {"type": "redacted_thinking", "data": "x"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "c"}, {"type": "tool_result", "tool_use_id": "c", "content": []},
]  # fmt: skip
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.one_of(st.just("x"), st.lists(st.sampled_from(BLOCKS), max_size=4)),
    }
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([2**31, -(2**63), 2**64, 10**40, 1e308, -0.0, "\x00", "\U0001d518", "a" * 300, "../../etc/passwd",
                     "user", "message", "function_call", "reasoning", "tool_use", "tool_result", "thinking"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "include_usage", "a", "", "name", "call_id", "arguments", "input"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A body that is right but for a few fields, or no body at all."""
    path = draw(st.sampled_from(sorted(FIELDS)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=60))
    changes = draw(st.dictionaries(st.sampled_from(FIELDS[path]), values, min_size=1, max_size=3))
    body = VALID[path] | changes
    if path == "/v1/responses" and draw(st.booleans()):
        body["input"] = draw(st.lists(st.sampled_from(ITEMS), max_size=4))
    elif path.startswith("/v1/messages") and draw(st.booleans()):
        body["messages"] = draw(st.lists(turns, max_size=4))
    for name in ("max_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and body[name] > 8:
            body[name] = 8
    content = json.dumps(body).encode()
    return path, content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 9)) == 0 else content


headers = st.dictionaries(
    st.sampled_from(
        ["content-type", "accept", "x-request-id", "x-request-timeout", "authorization", "expect", "traceparent"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip),
    max_size=2,
)


def fuzz(served: Served, examples: int) -> None:
    with served.http() as client:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(bodies(), headers)
        def attack(request: tuple[str, bytes], sent: dict[str, str]) -> None:
            path, content = request
            sent = {"content-type": "application/json"} | {name: v for name, v in sent.items() if name != "expect"}
            try:
                answer = client.post(path, content=content, headers=sent)
            except httpx.LocalProtocolError:
                return  # the client does not send such a header
            timed_out = "x-request-timeout" in sent and answer.status_code == 504
            assert answer.status_code < 500 or timed_out, (path, content, sent, answer.text)
            assert answer.headers["x-request-id"]
            if answer.status_code >= 400:
                anthropics = path.startswith("/v1/messages")
                expected = {"message", "type"} if anthropics else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == expected

        attack()
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "examples",
    [40, pytest.param(100, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.soak)],
)
def test_malformed_bodies_and_headers(examples: int, served: Served) -> None:
    fuzz(served, examples)


CONFORM = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


def schema_calls(served: Served, examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    with served.http() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        for operation in (result.ok() for result in schema.get_all_operations()):

            @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(operation.as_strategy())
            def call(case: Any) -> None:
                if isinstance(case.body, dict) and case.body.get("max_tokens", 0) != 1:
                    case.body["max_tokens"] = 1
                answer = case.call(base_url=served.url, timeout=120)
                assert answer.status_code < 500, answer.text
                case.validate_response(answer, checks=[getattr(schemathesis.specs.openapi.checks, n) for n in CONFORM])

            call()


@pytest.mark.parametrize(
    "examples", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)]
)
def test_what_the_openapi_document_allows(examples: int, served: Served) -> None:
    schema_calls(served, examples)


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"POST /v1/completions HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: y\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http(sent: bytes, served: Served) -> None:
    with socket.create_connection(address(served), timeout=60) as connection:
        got = b""
        try:
            connection.sendall(sent)
            with suppress(OSError):  # the server may have refused it, and left, before all of it was sent
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                got += part
        except ConnectionError:
            pass
    assert got == b"" or b" 4" in got.split(b"\r\n")[0], got[:200]
    with served.http() as client:
        assert client.get("/health").status_code == 200
